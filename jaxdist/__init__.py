"""jaxdist: LLM training and serving as one JAX SPMD program over a (dp, pp, tp) mesh.

Importing the package is light: JAX is loaded by the verb that needs it.
"""

import signal
import sys

__version__ = "0.1.0.dev0"

if sys.argv[:1] == ["-m"] and any(word.startswith("jaxdist.") for word in sys.orig_argv):
    # `python -m jaxdist.<verb>` starts: Ctrl-C ends it without a word, until `one_line_errors`.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

_LAZY = {
    "LLM": "jaxdist.llm",
    "SamplingParams": "jaxdist.inference.sampling.sampling_params",
    "StructuredOutputsParams": "jaxdist.inference.sampling.sampling_params",
}


def __getattr__(name: str):
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
