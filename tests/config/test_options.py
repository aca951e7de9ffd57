"""Options of a small door."""

from dataclasses import dataclass, field

import pytest

from jaxdist.config import UsageError
from jaxdist.config.options import parse_options


def option(meaning, **default):
    return field(metadata={"help": meaning}, **default)


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str = option("m")
    max_tokens: int = option("t", default=5)
    share: float | None = option("s", default=None)
    quick: bool = option("q", default=False)
    api_key: tuple[str, ...] = option("k", default=())


def parse(*words):
    return parse_options(Options, words, "door")


def test_words_become_typed_values():
    given = parse(
        "--model=1", "--max_tokens", "7", "--share", "0.5", "--quick", "--api-key", "a",
        "--api-key", "b",
    )  # fmt: skip
    assert given == Options(model="1", max_tokens=7, share=0.5, quick=True, api_key=("a", "b"))
    assert parse("--model", "x") == Options(model="x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "model"),
        (("--model", "x", "--max-tokens", "many"), "--max-tokens cannot be 'many'"),
        (("--modle", "x"), "--modle is not an option; did you mean --model?"),
        (("--model", "x", "--zzzz"), "--zzzz is not an option; --help lists them"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UsageError, match=message):
        parse(*words)


def test_help_lists_all(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    assert "--max-tokens" in capsys.readouterr().out
