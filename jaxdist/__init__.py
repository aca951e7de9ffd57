"""jaxdist: LLM training and serving as one JAX SPMD program over a (dp, pp, tp) mesh.

Importing the package is light: JAX is loaded by the verb that needs it.
"""

__version__ = "0.1.0.dev0"

_LAZY = {
    "LLM": "jaxdist.llm",
    "SamplingParams": "jaxdist.inference.sampling_params",
    "StructuredOutput": "jaxdist.inference.sampling_params",
}


def __getattr__(name: str):
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
