"""safetensors files: equal to the library's, and no damaged file gets further than one line."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxdist.config import UsageError
from jaxdist.interop.huggingface.safetensors_file import INDEX, open_safetensors
from jaxdist.interop.huggingface.safetensors_write import make_safetensors

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "c": np.zeros((0, 4), np.float16),
}
GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def write(path, header, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def test_equals_the_library(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    ours = open_safetensors(tmp_path)
    assert ours.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert ours[name].dtype == tensor.dtype and not ours[name].flags.writeable
        np.testing.assert_array_equal(ours[name], tensor)


@pytest.mark.parametrize("max_bytes", [10, 40, 10_000])
def test_the_library_reads_what_we_write(max_bytes, tmp_path):
    shapes = {"a": (2, 3), "b": (5,), "c": (1, 1)}
    views = make_safetensors(tmp_path, shapes, np.dtype(np.float32), max_bytes)
    for number, view in enumerate(views.values()):
        view[...] = number
    assert {name: view.shape for name, view in open_safetensors(tmp_path).items()} == shapes
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {10: 3, 40: 2, 10_000: 1}[max_bytes]
    read = {name: value for file in files for name, value in load_file(file).items()}
    for number, name in enumerate(shapes):
        assert (read[name] == number).all()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "JSON is damaged"),
        (b"[" * 100_000, "JSON is damaged"),
        (b"[]", "JSON is no object"),
        (b'{"a": 1, "a": 2}', "a name comes twice"),
        ({"a": 1}, "no sound dtype, shape and data_offsets for 'a'"),
        ({"a": GOOD["a"] | {"shape": [-2]}}, "no sound"),
        ({"a": GOOD["a"] | {"shape": [2**70]}}, "no sound"),
        ({"a": GOOD["a"] | {"shape": [10**9] * 6}}, "does not fill"),
        ({"a": GOOD["a"] | {"shape": [3]}}, "does not fill"),
        ({"a": GOOD["a"] | {"data_offsets": [8, 16]}}, "a gap or an overlap"),
        (GOOD | {"b": GOOD["a"]}, "a gap or an overlap"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "cut short or too long"),
        ({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, "as I64"),
        ({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}, "as F8_E4M3"),
    ],
)
def test_damaged_headers_are_refused(header, message, tmp_path):
    write(tmp_path / "model.safetensors", header)
    with pytest.raises(UsageError, match=message):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("length", [2**63, 2**40, 10**6])
def test_headers_longer_than_the_file_are_refused(length, tmp_path):
    write(tmp_path / "model.safetensors", GOOD, length=length)
    with pytest.raises(UsageError, match="its header ends after the file"):
        open_safetensors(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_or_flipped_byte_is_refused_or_harmless(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    path = folder / "model.safetensors"
    save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        open_safetensors(folder)
    except UsageError:
        pass


def test_the_index_is_held_against_the_files(tmp_path):
    def index(weight_map):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    write(tmp_path / "one.safetensors", GOOD)
    index({"a": "one.safetensors"})
    assert list(open_safetensors(tmp_path)) == ["a"]
    index({"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(UsageError, match="'b' is not in one.safetensors"):
        open_safetensors(tmp_path)
    index({"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(UsageError, match="two.safetensors is missing"):
        open_safetensors(tmp_path)
    index({"a": "../one.safetensors"})
    with pytest.raises(UsageError, match="no file here"):
        open_safetensors(tmp_path)
    index([])
    with pytest.raises(UsageError, match="weight_map"):
        open_safetensors(tmp_path)


def test_folders_without_safetensors_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no \*.safetensors$"):
        open_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match="only pytorch_model.bin"):
        open_safetensors(tmp_path)
