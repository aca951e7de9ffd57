"""The bytes that each token of a vocabulary stands for, which a grammar is matched against."""

import json
from typing import Any, NamedTuple

from jaxdist.config import UsageError
from jaxdist.data.tokenizer import BytesTokenizer, JsonTokenizer, SentencePieceTokenizer, Tokenizer

SPACE = "\u2581"  # a space in a SentencePiece
_FAMILIES = "a byte-level BPE, a SentencePiece model or bytes"


class TokenBytes(NamedTuple):
    """A vocabulary: bytes by id, empty for an id that no token has; ids that are no text."""

    tokens: list[bytes]
    special: list[int]


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Raises UsageError where the text of tokens is not that of each joined."""
    if isinstance(tokenizer, BytesTokenizer):
        return TokenBytes([*(bytes([i]) for i in range(256)), b"<eos>"], [256])
    if isinstance(tokenizer, JsonTokenizer):
        return _of_json(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _of_sentencepiece(tokenizer._inner)
    raise UsageError(f"structured output needs {_FAMILIES}; the tokenizer is {tokenizer.name}")


def _of_json(tokenizer: JsonTokenizer) -> TokenBytes:
    content = json.loads(tokenizer._inner.to_str())
    kinds = list(_kinds(content["decoder"]))
    if "ByteLevel" in kinds:
        to_bytes = _byte_level()
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        to_bytes = _piece
    else:
        raise UsageError(
            f"structured output needs {_FAMILIES}; the tokens of {tokenizer.name} are none"
        )
    tokens, special = [b""] * tokenizer.vocab_size, []
    for token, i in tokenizer._inner.get_vocab(with_added_tokens=False).items():
        tokens[i] = to_bytes(token)
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"].encode()
        if added["special"]:
            special.append(added["id"])
    return TokenBytes(tokens, special)


def _of_sentencepiece(inner: Any) -> TokenBytes:
    ids = range(inner.get_piece_size())
    special = [i for i in ids if inner.is_control(i) or inner.is_unknown(i) or inner.is_unused(i)]
    return TokenBytes([_piece(inner.id_to_piece(i)) for i in ids], special)


def _kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    inner = (kind for part in decoder.get("decoders", ()) for kind in _kinds(part))
    return [decoder["type"], *inner]


def _piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


def _byte_level():
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in shown]
    spelled |= {chr(256 + i): byte for i, byte in enumerate(hidden)}

    def to_bytes(token: str) -> bytes:
        # A token that was added to the vocabulary is spelled as it is.
        known = all(letter in spelled for letter in token)
        return bytes(spelled[letter] for letter in token) if known else token.encode()

    return to_bytes
