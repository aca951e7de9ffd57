import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf.header import read_header


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(
    name: str,
    dims: tuple[int, ...] = (32,),
    kind: int = 0,
    offset: int = 0,
    rank: int | None = None,
) -> bytes:
    head = string(name) + struct.pack("<I", len(dims) if rank is None else rank)
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def file_of(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors))
    return head + bytes(-len(head) % 32 + data)


STRINGS = struct.pack("<IQ", 8, 2) + string("a") + string("é")
GOOD = file_of(
    keys=(
        key("general.architecture", 8, string("llama")),
        key("an.integer", 10, struct.pack("<Q", 2**40)),
        key("a.float", 6, struct.pack("<f", 0.5)),
        key("a.flag", 7, b"\1"),
        key("numbers", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 7)),
        key("flags", 9, struct.pack("<IQ", 7, 2) + b"\0\1"),
        key("strings", 9, STRINGS),
    ),
    tensors=(tensor("b", (32, 2), 8, offset=128), tensor("a", (32,))),
    data=128 + 68,
)


def test_what_a_sound_file_says(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(GOOD)
    header = read_header(tmp_path / "m.gguf")
    values: dict[str, Any] = dict(header.metadata)
    assert values.pop("numbers").tolist() == [-1, 0, 7]
    assert values.pop("flags").tolist() == [False, True]
    strings = values.pop("strings")
    assert (len(strings), *strings) == (2, "a", "é") and strings[-1:] == ["é"]
    assert values == {
        "general.architecture": "llama",
        "an.integer": 2**40,
        "a.float": 0.5,
        "a.flag": True,
    }
    assert list(header.tensors) == ["b", "a"]
    assert header.tensors["b"].shape == (2, 32) and header.tensors["b"].type.name == "Q8_0"
    assert header.raw("b").shape == (2, 34) and header.raw("a").shape == (128,)
    assert not header.raw("a").flags.writeable


def test_the_packages_reader_agrees(small, tmp_path: Path):
    path = tmp_path / "m.gguf"
    small.write(path, "llama", "q4_0")
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert ours.offset == theirs.data_offset and ours.num_bytes == theirs.n_bytes
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
    for name, found in reader.fields.items():
        if not name.startswith("GGUF."):
            assert header.metadata[name] == found.contents()


HOSTILE = {
    "too few for a GGUF file": b"GGUF",
    "magic: b'GGML'": file_of(magic=b"GGML"),
    "version: 1 is not one of": file_of(version=1),
    "big-endian": file_of(version=3 << 24),
    "tensor count: 18446744073709551615 is more than": file_of(num_tensors=2**64 - 1),
    "key count: 60000 do not fit": file_of(num_keys=60000),
    "key 0: a length of 9223372036854775808 bytes": file_of((struct.pack("<QI", 2**63, 0),)),
    "key 0: is not UTF-8": file_of((key(b"\xff", 7, b"\0"),)),
    "key 'a': occurs twice": file_of((key("a", 7, b"\0"),) * 2),
    r"'\\x1b\[2J': type 99 is unknown": file_of((key("\x1b[2J", 99, b"\0"),)),
    "a: 2 is neither true": file_of((key("a", 7, b"\2"),)),
    "a: takes 17179869184 bytes": file_of((key("a", 8, struct.pack("<Q", 2**34)),)),
    "a: 4611686018427387904 is more": file_of((key("a", 9, struct.pack("<IQ", 10, 2**62)),)),
    "a: 40 do not fit": file_of((key("a", 9, struct.pack("<IQ", 10, 40)),)),
    "a: an array of type 9": file_of((key("a", 9, struct.pack("<IQ", 9, 1)),)),
    "a: holds bytes that are neither": file_of((key("a", 9, struct.pack("<IQB", 7, 1, 3)),)),
    "a: string 1 reaches beyond": file_of(
        (key("a", 9, struct.pack("<IQ", 8, 2) + string("x") + struct.pack("<Q", 2**60)),)
    ),
    "a: 4194305 is more than": file_of((key("a", 9, struct.pack("<IQ", 8, 2**22 + 1)),)),
    "general.alignment: 24 is not": file_of((key("general.alignment", 4, struct.pack("<I", 24)),)),
    "general.alignment: 'x'": file_of((key("general.alignment", 8, string("x")),)),
    "name of tensor 0: a length of 65": file_of(tensors=(tensor("x" * 65),), data=128),
    "tensor 'a': 5 dims": file_of(tensors=(tensor("a", (1,) * 5),), data=128),
    "tensor 'a': 4294967295 dims": file_of(tensors=(tensor("a", rank=2**32 - 1),), data=128),
    "tensor 'a': type 4 is unknown": file_of(tensors=(tensor("a", kind=4),), data=128),
    r"'a': dims \[0\] do not": file_of(tensors=(tensor("a", (0,)),), data=128),
    "multiple of Q8_0's block of 32": file_of(tensors=(tensor("a", (33,), 8),), data=128),
    "offset 4 is not a multiple": file_of(tensors=(tensor("a", offset=4),), data=256),
    "tensor 'a': ends": file_of(tensors=(tensor("a", (2**62, 2**62, 2**62)),), data=128),
    "'a': ends 32 bytes beyond": file_of(tensors=(tensor("a", offset=32),), data=128),
    "'a': ends 18446744073709551616 bytes": file_of(tensors=(tensor("a", offset=2**64 - 128),)),
    "tensor 'a': occurs twice": file_of(tensors=(tensor("a"),) * 2, data=128),
    "tensor 'b': overlaps tensor 'a'": file_of(
        tensors=(tensor("b", offset=96), tensor("a")), data=256
    ),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_files_are_refused_in_one_line(message: str, tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[message])
    with pytest.raises(UsageError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path):
    path = tmp_path / "m.gguf"
    for length in range(len(GOOD)):
        path.write_bytes(GOOD[:length])
        with pytest.raises(UsageError, match="m.gguf"):
            read_header(path)


def test_strings_that_are_not_utf8_are_refused_when_read(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of((key("a", 9, struct.pack("<IQ", 8, 1) + string(b"\xff")),)))
    strings = read_header(path).metadata["a"]
    assert not isinstance(strings, (int, float, str, np.ndarray))
    with pytest.raises(UsageError, match="m.gguf: a: string 0 is not UTF-8"):
        strings[0]
    with pytest.raises(IndexError):
        strings[1]


def test_what_is_no_file_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        read_header(tmp_path / "absent.gguf")
    with pytest.raises(UsageError, match="no such file"):
        read_header(tmp_path)
