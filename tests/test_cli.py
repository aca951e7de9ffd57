import sys
from types import ModuleType

import pytest

from jaxdist import __version__, cli


def exits(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and all output of the console script."""
    try:
        code = cli.main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(capsys, "--version") == (0, f"jaxdist {__version__}\n")
    code, text = exits(capsys, "--help")
    assert code == 0 and all(verb in text for verb in cli.VERBS)


def test_unknown_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = exits(capsys, "trian")
    assert code == 2 and "did you mean train?" in text and text.count("\n") == 1
    code, text = exits(capsys)
    assert code == 2 and "a verb is missing" in text


def test_arguments_go_to_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    verb = ModuleType("jaxdist.generate")
    verb.main = lambda argv: len(argv)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxdist.generate", verb)
    assert cli.main(["generate", "--a", "1"]) == 2


def test_train_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = exits(capsys, "train", "--train.steps", "0")
    assert (code, text) == (2, "jaxdist: error: train.steps=0 must be at least 1\n")
