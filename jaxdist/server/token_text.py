"""The bytes and the text of single tokens, for log-probabilities."""

import json
from typing import Any

from jaxdist.data.tokenizer import JsonTokenizer, SentencePieceTokenizer, Tokenizer

_SPACE = "\u2581"  # how SentencePiece writes a space


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (GPT-2's table)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(b): b for b in printed} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenText:
    """What each id stands for."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._inner: Any = getattr(tokenizer, "_inner", None)
        self._bytes_of_chars: dict[str, int] = {}
        self._added: dict[int, str] = {}
        if isinstance(tokenizer, JsonTokenizer):
            added = self._inner.get_added_tokens_decoder()
            self._added = {i: token.content for i, token in added.items()}
            decoder = json.loads(self._inner.to_str()).get("decoder") or {}
            if "ByteLevel" in json.dumps(decoder):
                self._bytes_of_chars = _byte_of_char()

    def bytes(self, token: int) -> bytes:
        """The token's bytes, which may be part of a character."""
        tokenizer = self._tokenizer
        if token in self._added:
            return self._added[token].encode()
        if isinstance(tokenizer, JsonTokenizer):
            piece = self._inner.id_to_token(token)
        elif isinstance(tokenizer, SentencePieceTokenizer):
            inside = 0 <= token < tokenizer.vocab_size
            piece = self._inner.id_to_piece(token) if inside else None
        else:
            return bytes([token]) if 0 <= token < 256 else b""
        if piece is None:  # the model's vocabulary may be larger than the tokenizer's
            return b""
        if self._bytes_of_chars and all(char in self._bytes_of_chars for char in piece):
            return bytes(self._bytes_of_chars[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(_SPACE, " ").encode()

    def text(self, token: int) -> str:
        """The token's text; parts of characters as OpenAI writes them, `bytes:\\xe2\\x80`."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
