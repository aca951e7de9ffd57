"""Streamed text equals the text decoded at once, and no piece splits a character."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.inference.detokenizer import TextStream


class Bytes:
    """A token a byte, as the bytes tokenizer decodes; id 256 is special and has no text."""

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class EachByteReplaced(Bytes):
    """As SentencePiece's byte tokens: every byte of an unfinished character is one U+FFFD."""

    def decode(self, ids):
        data, text, start = bytes(ids), "", 0
        while start < len(data):
            for end in range(start + 1, min(start + 4, len(data)) + 1):
                try:
                    text, start = text + data[start:end].decode(), end
                    break
                except UnicodeDecodeError:
                    continue
            else:
                text, start = text + "\ufffd", start + 1
        return text


class Words:
    """Words separated by spaces; the first has none, as in SentencePiece."""

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)


@pytest.mark.parametrize("tokenizer", [Bytes(), EachByteReplaced()])
@pytest.mark.parametrize("prompt", ["", "héllo ", "日本"])
def test_no_character_is_split(tokenizer, prompt):
    text = "a é 日本語 🎉👩‍👩‍👧 z"
    stream = TextStream(tokenizer, list(prompt.encode()))
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.finish() == ""


@pytest.mark.parametrize("tokenizer", [Bytes(), EachByteReplaced()])
def test_pieces_join_to_the_whole_for_any_bytes(tokenizer):
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.choice((65, 0xC3, 0xA9, 0xF0, 0x9F, 0x8E, 0x89, 0xFF)) for _ in range(20)]
        stream = TextStream(tokenizer, [])
        assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_a_model_that_ends_inside_a_character_ends_with_the_mark():
    stream = TextStream(Bytes(), [])
    assert [stream.push(byte) for byte in "é".encode()[:1]] == [""]
    assert stream.finish() == "\ufffd"


def test_what_a_token_adds_may_depend_on_the_prompt():
    stream = TextStream(Words(), [1, 2])
    assert [stream.push(3), stream.push(4), stream.finish()] == [" w3", " w4", ""]


class LeadingSpace(Bytes):
    """As Llama's tokenizer.json: one space where the text begins is left out."""

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


@pytest.mark.parametrize(
    "tokenizer",
    [Bytes(), EachByteReplaced(), LeadingSpace(), Words()],
    ids=lambda t: type(t).__name__,
)
@given(
    st.lists(st.sampled_from([*b" a", *"é日🎉".encode(), 0xFF, 256]), max_size=12),
    st.lists(st.sampled_from([*b" a", *"é日🎉".encode(), 0xFF, 256]), max_size=120),
)
def test_the_window_gives_what_the_whole_gives(tokenizer, prompt, ids):
    if isinstance(tokenizer, EachByteReplaced):
        ids, prompt = ([i for i in part if i != 256] for part in (ids, prompt))
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    whole = tokenizer.decode([*prompt, *ids])
    assert "".join(pieces) == whole[len(tokenizer.decode(prompt)) :]


def test_a_character_that_the_prompt_began():
    stream = TextStream(EachByteReplaced(), [240, 169])
    assert [*map(stream.push, [169, 169, 32, 97]), stream.finish()] == ["", "", "", "a", ""]


@pytest.mark.parametrize("ids", [[0xFF] * 3000, [256] * 3000, [*"é".encode(), 0x80] * 1000])
def test_the_work_for_a_token_is_bounded(ids):
    lengths = []

    class Counted(Bytes):
        def decode(self, ids):
            lengths.append(len(ids))
            return super().decode(ids)

    stream = TextStream(Counted(), list(b"prompt"))
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == Bytes().decode(ids)
    assert max(lengths) < 100


def test_special_tokens_add_nothing():
    stream = TextStream(Bytes(), [65])
    assert [stream.push(256), stream.push(66)] == ["", "B"]
