"""`python -m jaxdist.convert SOURCE TARGET`: a model from one form of storage to another."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jaxdist.config import UsageError, one_line_errors


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    source: str
    target: str
    dtype: str | None
    gguf_type: str | None
    ema: bool
    force: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and convert; returns the exit code."""
    with one_line_errors():
        options = parse(sys.argv[1:] if argv is None else argv)
        # JAX is loaded here, after the arguments are known to be right.
        from jaxdist.training.conversion import convert

        convert(
            options.source,
            options.target,
            dtype=options.dtype,
            gguf_type=options.gguf_type,
            ema=options.ema,
            force=options.force,
        )
    return 0


def parse(argv: Sequence[str]) -> Options:
    """The options that the arguments spell."""
    parser = _Parser(
        prog="jaxdist convert",
        description="Convert a model. What SOURCE is, is told by what lies there.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SOURCE",
        help="A run's folder, a Hugging Face folder, a .gguf file, or a name on the hub.",
    )  # fmt: skip
    parser.add_argument(
        "target", metavar="TARGET",
        help="A GGUF file where it ends in .gguf, else a Hugging Face folder.",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", help="float32, bfloat16 or float16 [the source's]", metavar="DTYPE"
    )
    parser.add_argument(
        "--gguf-type", metavar="TYPE", help="f32, f16, bf16, q8_0 or q4_0 [the source's dtype]"
    )
    parser.add_argument(
        "--ema", action="store_true",
        help="Of a run with optimizer.ema_decay, the averaged weights.",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="Replace what is at TARGET.")
    words = [word.replace("_", "-") if word.startswith("--") else word for word in argv]
    return Options(**vars(parser.parse_args(words)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the options")


if __name__ == "__main__":
    sys.exit(main())
