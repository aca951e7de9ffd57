"""The command line of the training verbs: flags in, a checked `RunConfig` out.

jsonargparse reads typed values; what is a key, what wins over what, and how an error reads is
decided here and in `layers.py`.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.config.init_from import ReadOrigin
from jaxdist.config.keys import Key, keys, sections
from jaxdist.config.layers import Layer, build, load, read_layer, save_config, to_yaml
from jaxdist.config.run import RunConfig

__all__ = ["load", "parse", "save_config", "to_yaml"]

_OWN_OPTIONS = ("--help", "--config", "--print-config")


def parse(argv: Sequence[str], prog: str, read_origin: ReadOrigin | None = None) -> RunConfig:
    """The config that the arguments ask for.

    `--config` files come first, in their order, then single options over them. `--help` and
    `--print-config` print and exit.

    Args:
        argv: Arguments without the program's name.
        prog: The program's name, for the help.
        read_origin: Reads the model that `--init-from` names.

    Raises:
        UsageError: At the first argument that cannot work, with the fix.
    """
    parser = _parser(prog)
    try:
        values: Layer = parser.parse_args(_canonical(argv)).as_dict()
    except argparse.ArgumentError as error:
        raise UsageError(_one_line(str(error))) from None
    files = values.pop("config", [])
    print_config = values.pop("print_config", False)
    named = {"name": Path(files[-1]).stem} if files else {}
    config = build([named, *map(read_layer, files), values], read_origin)
    if print_config:
        sys.stdout.write(to_yaml(config))
        sys.stdout.flush()  # here a reader that has gone is met as an error of ours
        raise SystemExit(0)
    return config


def _parser(prog: str) -> ArgumentParser:
    """A parser that returns only what was given: defaults belong to the lowest layer."""
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [--mesh DPxPPxTP] [--SECTION.KEY VALUE ...]",
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=argparse.HelpFormatter,
    )
    everyday = parser.add_argument_group("everyday flags")
    everyday.add_argument(
        "--config", action="append", default=argparse.SUPPRESS, metavar="FILE.yaml",
        help="Values to start from; a later file wins over an earlier one, an option over all.",
    )  # fmt: skip
    everyday.add_argument(
        "--print-config", action="store_true", default=argparse.SUPPRESS,
        help="Print the whole config as YAML that --config reads back, and exit.",
    )  # fmt: skip
    groups: dict[str, Any] = {"": everyday}
    for name, kind in sections().items():
        groups[name] = parser.add_argument_group(name, (kind.__doc__ or "").split("\n")[0])
    for key in keys().values():
        _add(groups[key.section], key)
    return parser


def _add(group: Any, key: Key) -> None:
    hint: Any = key.hint
    several: dict[str, Any] = {}
    if key.is_flag:
        several = {"nargs": "?", "const": True}
    elif key.is_list:
        hint, several = str | dict, {"nargs": "+"}
    group.add_argument(
        key.option,
        type=hint,
        default=argparse.SUPPRESS,
        metavar=key.placeholder,
        help=(key.meaning + (f" [{key.default}]" if key.default else "")).replace("%", "%%"),
        **several,
    )


def _canonical(argv: Sequence[str]) -> list[str]:
    """The arguments with their options spelled as the parser knows them.

    Options may be written with - or _. A value that begins with a minus, as in `--mesh -1x2x2`,
    is tied to its option, since the parser would take it for one.
    """
    options = {option.replace("-", "_"): option for option in _OWN_OPTIONS}
    options |= {key.option.replace("-", "_"): key.option for key in keys().values()}
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            option = options.get(name.replace("-", "_"))
            if option is None:
                hint = did_you_mean(name, options.values())
                raise UsageError(f"{name} is not an option{hint or '; --help lists them'}")
            words.append(option + equals + value)
        elif word.startswith("-") and word != "-h" and words and words[-1].startswith("--"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _one_line(message: str) -> str:
    """The parser's message in our words."""
    typed = re.search(r'Parser key "([\w.]+)".*?(?:Got|Given) value: (.*)$', message, re.DOTALL)
    if typed and typed[1] in keys():
        key = keys()[typed[1]]
        return f"{key.path}={typed[2]!r} must be {key.kind}"
    lone = re.match(r"argument (\S+): expected (.*)", message)
    if lone:
        return f"{lone[1]} needs a value"
    stray = re.match(r"unrecognized arguments: (.*)", message)
    if stray:
        return f"{stray[1]!r} belongs to no option; options begin with --"
    return message
