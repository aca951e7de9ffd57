import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.config.errors import OTHER_NAMES, UsageError, did_you_mean, nearest, one_line_errors
from jaxdist.config.keys import keys

PATHS = sorted(keys())


def test_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, one_line_errors():
        raise UsageError("steps=0 must be\n  at least 1")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "jaxdist: error: steps=0 must be at least 1\n"


@pytest.mark.parametrize("line", ["print('a')", "Console().print('a')"])
def test_a_reader_that_has_gone_ends_it_quietly(line: str) -> None:
    code = (
        "from rich.console import Console\n"
        "from jaxdist.config import one_line_errors\n"
        f"input()\nwith one_line_errors(): {line}; print('b', flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert (process.wait(60), process.stderr.read()) == (141, b"")
    process.stderr.close()


@pytest.mark.parametrize("error", [ValueError("bad"), FileNotFoundError(2, "gone", "a.txt")])
def test_set_up_errors_become_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), one_line_errors():
        raise error
    assert capsys.readouterr().err.count("\n") == 1


def test_a_message_that_is_empty_names_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), one_line_errors():
        raise ValueError
    assert capsys.readouterr().err == (
        "jaxdist: error: ValueError (JAXDIST_TRACEBACK=1 shows where)\n"
    )


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("ours")
    with pytest.raises(SystemExit, match="0"), one_line_errors():
        sys.exit(0)


def test_ctrl_c_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="130"), one_line_errors():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "error",
    [MemoryError("745 GiB"), RuntimeError("RESOURCE_EXHAUSTED: 745 GiB\nand a long list")],
)
def test_lack_of_memory_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        raise error
    said = capsys.readouterr().err
    assert "out of memory" in said and "745 GiB)" in said and said.count("\n") == 1


def test_faults_of_ours_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="other"), one_line_errors():
        raise RuntimeError("other")


def test_traceback_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_TRACEBACK", "1")
    with pytest.raises(UsageError), one_line_errors():
        raise UsageError("x")


@given(st.sampled_from(PATHS), st.data())
def test_one_wrong_letter_finds_the_key(path: str, data: st.DataObject) -> None:
    section, _, name = path.rpartition(".")
    position = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from(["", "x", name[position] * 2]))
    typo = name[:position] + letter + name[position + 1 :]
    wrong = f"{section}.{typo}" if section else typo
    assert wrong == path or len(name) < 5 or path in nearest(wrong, PATHS)


@given(st.text(max_size=30))
def test_nearest_gives_few_candidates_for_any_word(word: str) -> None:
    close = nearest(word, PATHS)
    assert len(close) <= 3 and set(close) <= set(PATHS)


def test_a_key_without_its_section_is_found() -> None:
    assert nearest("--lerning-rate", ["--optimizer.learning_rate", "--seed"]) == [
        "--optimizer.learning_rate"
    ]


@pytest.mark.parametrize("ours", OTHER_NAMES)
def test_others_names_find_our_keys(ours: str) -> None:
    options = {path: key.option for path, key in keys().items()}
    section = ours.rpartition(".")[0]
    for other in OTHER_NAMES[ours].split():
        assert other not in {key.name for key in keys().values()}
        for word in (f"{section}.{other}", f"--{section}.{other}", f"--{other.replace('_', '-')}"):
            assert nearest(word, PATHS)[0] == ours
            assert nearest(word, options.values())[0] == options[ours]


def test_others_names_mean_nothing_where_the_key_is_not_asked_for() -> None:
    assert nearest("--batch", ["--max-batch", "--seed"]) == ["--max-batch"]


def test_nothing_near_gives_no_hint() -> None:
    assert did_you_mean("qqq", PATHS) == ""
    assert did_you_mean("x", []) == ""
