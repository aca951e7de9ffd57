"""The bytes and the text of single tokens, for log-probabilities."""

from jaxdist.config import UsageError
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.guidance.token_bytes import token_bytes


class TokenText:
    """What each id stands for."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        try:
            self._bytes: list[bytes] | None = token_bytes(tokenizer).tokens
        except UsageError:  # a vocabulary whose tokens have no bytes of their own
            self._bytes = None

    def bytes(self, token: int) -> bytes:
        """The token's bytes, which may be part of a character."""
        if self._bytes is None:
            return self._tokenizer.decode([token]).encode()
        # The model's vocabulary may be larger than the tokenizer's.
        return self._bytes[token] if token < len(self._bytes) else b""

    def text(self, token: int) -> str:
        """The token's text; parts of characters as OpenAI writes them, `bytes:\\xe2\\x80`."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def name(self, token: int, as_id: bool | None) -> str:
        """The token's text, or vLLM's `token_id:ID`, which no other token shares."""
        return f"token_id:{token}" if as_id else self.text(token)
