"""Streamed text equals the text decoded at once, and no piece splits a character."""

import random

import pytest

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


def test_special_tokens_add_nothing():
    stream = TextStream(Bytes(), [65])
    assert [stream.push(256), stream.push(66)] == ["", "B"]
