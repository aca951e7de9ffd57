"""The options of a small door: one frozen dataclass, each field an option with its help.

Fields are str, int, float (or one of them or None), bool for a flag, or tuple[str, ...] for an
option that may be given several times. A field without a default must be given.
"""

import re
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

from jsonargparse import ArgumentParser

from jaxdist.config.errors import UsageError, did_you_mean

Options = TypeVar("Options")
REQUIRED = MISSING
MODEL = "A training run's folder, a Hugging Face folder, a .gguf file or a hub name."


def option(default: Any, meaning: str) -> Any:
    """A field that is an option; its default may be REQUIRED."""
    return field(default=default, metadata={"help": meaning})


def parse_options(kind: type[Options], argv: Sequence[str], prog: str) -> Options:
    """The options that the arguments spell. UsageError at the first that cannot work."""
    parser = ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False)
    for own in fields(kind):  # type: ignore[arg-type]
        name, meaning = dashed("--" + own.name), own.metadata["help"]
        if own.type is bool:
            parser.add_argument(name, action="store_true", help=meaning)
        elif own.type == tuple[str, ...]:
            parser.add_argument(name, action="append", type=str, default=[], help=meaning)
        else:
            needed = own.default is MISSING
            default = None if needed else own.default
            parser.add_argument(name, type=own.type, default=default, required=needed, help=meaning)
    words = list(map(dashed, argv))
    known = ["--help", *(dashed("--" + own.name) for own in fields(kind))]  # type: ignore[arg-type]
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in known:
            hint = did_you_mean(name, known) or "; --help lists them"
            raise UsageError(f"{name} is not an option{hint}")
    try:
        values = parser.parse_args(words).as_dict()
    except ArgumentError as error:
        wrong = re.search(r'"(\w+)".*value: (.*)', str(error), re.DOTALL)
        message = f"{dashed('--' + wrong[1])} cannot be {wrong[2]!r}" if wrong else str(error)
        raise UsageError(f"{message}; --help lists the options") from None
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def dashed(word: str) -> str:
    """An option's name with - for each _; any other word as it is."""
    return re.sub(r"^--\w+", lambda name: name[0].replace("_", "-"), word)
