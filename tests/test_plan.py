"""`jaxdist plan --schedule`: figures, picture and table, without JAX."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jaxdist.plan import main

SVG = "{http://www.w3.org/2000/svg}"


def figures(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_figures(capsys):
    found = figures(
        capsys, "--schedule", "interleaved", "--pp", "4", "--microbatches", "8", "--chunks", "2"
    )
    assert found["bubble"] == pytest.approx(3 / 19)
    assert (found["ticks"], found["peak_in_flight"], found["ring_slots"]) == (26, 11, 11)
    # Costs are of a whole stage, so schedules compare: 1F1B takes 33, ZB-H1 27.
    assert found["time"] == pytest.approx(28.5) and found["ideal_time"] == pytest.approx(24)
    assert figures(capsys, "--schedule", "1f1b")["time"] == pytest.approx(33)
    assert figures(capsys, "--schedule", "zb")["time"] == pytest.approx(27)
    assert figures(capsys, "--schedule", "1f1b", "--costs", "1,2,2")["time"] == pytest.approx(55)


def test_uneven_stages_wait_for_the_longest(capsys):
    found = figures(capsys, "--schedule", "1f1b", "--layout", "7,8,8,9")
    assert 33 < found["time"] <= 33 * 9 / 8
    assert found["ideal_time"] == pytest.approx(24)


@pytest.mark.parametrize(
    "argv",
    [
        ("--schedule", "interleaved", "--pp", "4", "--microbatches", "8", "--chunks", "2"),
        ("--schedule", "zb", "--pp", "3", "--microbatches", "5"),
        ("--schedule", "gpipe", "--pp", "8", "--microbatches", "64", "--costs", "1,0.5,3"),
        ("--schedule", "1f1b", "--pp", "1", "--microbatches", "1"),
    ],
)
def test_the_picture_shows_every_slot_once(tmp_path: Path, capsys, argv):
    """Boxes lie side by side within the chart: one for each slot, none over another."""
    path = tmp_path / "out.svg"
    found = figures(capsys, *argv, "--picture", str(path))
    root = ElementTree.parse(path).getroot()
    width = float(root.attrib["width"])
    slots: dict[str, list[tuple[float, float]]] = {}
    for group in root.iter(f"{SVG}g"):
        box, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        left, long = float(box.attrib["x"]), float(box.attrib["width"])
        slots.setdefault(title.text.rsplit(" ", 1)[1], []).append((left, left + long))
    kinds = 3 if found["schedule"] == "zb" else 2
    assert len(slots) == found["stages"]
    for boxes in slots.values():
        assert len(boxes) == kinds * found["microbatches"] * found["chunks"]
        boxes.sort()
        for (_, right), (left, _) in zip(boxes, boxes[1:], strict=False):
            assert right <= left + 0.15
        assert boxes[-1][1] <= width
    text = "".join(root.itertext())
    assert f"bubble {found['bubble']:.1%}" in text and "forward" in text and "bubble" in text


@pytest.mark.parametrize(
    "argv",
    [
        ("--schedule", "interleaved", "--pp", "2", "--microbatches", "2", "--chunks", "64"),
        ("--schedule", "zb", "--pp", "2", "--microbatches", "1", "--costs", "0.001,0.002,0.001"),
        ("--schedule", "gpipe", "--pp", "2", "--microbatches", "1200"),
    ],
)
def test_the_picture_is_as_wide_as_its_words_and_slots(tmp_path: Path, capsys, argv):
    """Legend and chart end inside of it; slots narrower than a pixel lie apart all the same."""
    path = tmp_path / "out.svg"
    figures(capsys, *argv, "--picture", str(path))
    root = ElementTree.parse(path).getroot()
    width = float(root.attrib["width"])
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width
    for words in root.iter(f"{SVG}text"):
        if words.attrib["text-anchor"] == "start":
            long = 0.55 * float(words.attrib["font-size"]) * len(words.text)
            assert float(words.attrib["x"]) + long <= width, words.text
    lines = [float(line.attrib["x1"]) for line in root.iter(f"{SVG}line")]
    assert all(b - a > 2.8 for a, b in zip(lines, lines[1:], strict=False))
    rows: dict[str, list[tuple[float, float]]] = {}
    for group in root.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        left, long = float(box.attrib["x"]), float(box.attrib["width"])
        rows.setdefault(box.attrib["y"], []).append((left, left + long))
    for boxes in rows.values():
        boxes.sort()
        for (_, right), (left, _) in zip(boxes, boxes[1:], strict=False):
            assert right <= left + 0.02


def test_paths_are_taken_as_they_are_written(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--schedule=1f1b", "--pp=2", "--table=my_[old]table.csv"]) == 0
    assert main(["--schedule=my_[old]table.csv", "--picture=my_picture.svg"]) == 0
    assert capsys.readouterr().out.count("my_[old]table.csv") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "my_[old]table.csv",
        "my_picture.svg",
    ]


def test_the_same_of_a_file(tmp_path: Path, capsys):
    table, picture = tmp_path / "mine.csv", tmp_path / "out.svg"
    want = figures(capsys, "--schedule", "zb", "--pp", "3", "--table", str(table))
    found = figures(capsys, "--schedule", str(table), "--picture", str(picture))
    assert want | {"schedule": str(table)} == found
    assert picture.read_text().startswith("<svg")


def test_words(capsys):
    assert main(["--schedule", "zb"]) == 0
    text = capsys.readouterr().out
    for word in ("zb: 4 stages, 8 microbatches", "bubble", "11.1%", "peak in flight", "tap slots"):
        assert word in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--schedule NAME"),
        (["--schedule", "zbv"], "not known; choose gpipe, 1f1b, interleaved, zb, or a .csv file"),
        (["--schedule", "1f1b", "--chunks", "2"], "1f1b has 1 chunk a stage, not 2"),
        (["--schedule", "1f1b", "--pp", "0"], "--pp=0 must be"),
        (["--schedule", "1f1b", "--pp", "4096", "--microbatches", "65"], "is 266,240: at most"),
        (["--schedule", "1f1b", "--pp", "two"], "invalid int value: 'two'"),
        (["--schedule", "1f1b", "--costs", "1,2"], "--costs '1,2' must be three numbers"),
        (["--schedule", "1f1b", "--costs", "1,0,nan"], "each must be a number from 1e-6 to 1e6"),
        (["--schedule", "1f1b", "--costs", "1e-308,1,1"], "each must be a number from 1e-6"),
        (["--schedule", "1f1b", "--table", "out.txt"], "must end in .csv"),
        (["--schedule", "1f1b", "--layout", "1,2"], "has 2 counts; 4 stages x 1 chunks need 4"),
        (["--schedule", "1f1b", "--picture", "out.png"], "must end in .svg"),
        (["--schedule", "none.csv"], "none.csv cannot be read"),
        (["--schedule", "1f1b", "--picture", "/nowhere/out.svg"], "No such file"),
    ],
)
def test_refuses_in_one_line(capsys, argv, words):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_loads_no_jax():
    program = "import sys; from jaxdist.plan import main; main(['--schedule', 'zb', '--json']);"
    program += "assert 'jax' not in sys.modules, 'jax'"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
