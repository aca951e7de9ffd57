"""The console script `jaxdist`: one subcommand a verb, each also `python -m jaxdist.<verb>`."""

import importlib
import sys
from collections.abc import Sequence

from jaxdist import __version__
from jaxdist.config.errors import UsageError, did_you_mean, one_line_errors

VERBS = {
    "train": "Train a model as a config says.",
    "generate": "Write text with a trained model.",
    "serve": "Serve a model under OpenAI's API, with a chat page.",
    "plan": "Tell what a run will take, before it runs.",
    "convert": "Turn a run, a Hugging Face folder or a GGUF file into one another.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Hand the arguments to the verb's own `main`, loading no other; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with one_line_errors():
        if words and words[0] in ("-h", "--help"):
            print(_help())
            return 0
        if words and words[0] == "--version":
            print(f"jaxdist {__version__}")
            return 0
        if not words or words[0] not in VERBS:
            hint = did_you_mean(words[0], VERBS) if words else ""
            given = f"{words[0]!r} is not a verb" if words else "a verb is missing"
            raise UsageError(f"{given}; choose one of {', '.join(VERBS)}{hint}")
        verb = importlib.import_module(f"jaxdist.{words[0]}")
    return verb.main(words[1:])


def _help() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {meaning}" for verb, meaning in VERBS.items()]
    return "\n".join(
        ["usage: jaxdist VERB [OPTIONS]", "", *lines, "", "jaxdist VERB --help says more."]
    )
