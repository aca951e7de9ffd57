"""Structured output: what the next token of a text may be, for it to conform to a grammar.

The grammars are llguidance's. End-of-sequence is allowed exactly where the text is complete.
Shapes: k drafts, W = ceil(vocab_size / 32) words of bits.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from jaxdist.config import UsageError
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.guidance.grammar_checker import Checkers, make_tokenizer, start
from jaxdist.inference.guidance.json_schema import schema_text
from jaxdist.inference.guidance.token_bytes import token_bytes
from jaxdist.inference.sampling.sampling_params import StructuredOutputsParams

MAX_BYTES = 256 * 2**10  # of a grammar
_CACHED = 64  # grammars of a tokenizer
_LONGEST_REASON = 200  # characters


class Grammar:
    """A compiled grammar; any number of texts are matched with it."""

    def __init__(self, first: LLMatcher, eos_ids: frozenset[int], vocab_size: int):
        self._first, self._eos_ids, self._vocab_size = first, eos_ids, vocab_size

    def matcher(self) -> "Matcher":
        """At the beginning of a text."""
        return Matcher(self._first.deep_copy(), self._eos_ids, self._vocab_size)


class Matcher:
    """Where one text stands in its grammar.

    A text that leaves its grammar, or on which llguidance runs into its limits, is at a dead end:
    `is_finished`, and no token is allowed.
    """

    def __init__(self, inner: LLMatcher, eos_ids: frozenset[int], vocab_size: int):
        self._inner, self._eos_ids, self._vocab_size = inner, eos_ids, vocab_size
        self._ended = False

    @property
    def is_finished(self) -> bool:
        """Whether no token but the end may follow."""
        return self._ended or self._inner.is_stopped()

    @property
    def is_complete(self) -> bool:
        """Whether the text so far conforms."""
        return self._inner.is_accepting()

    def masks(self, drafts: Sequence[int] = ()) -> tuple[np.ndarray, int]:
        """(allowed tokens before each draft and after the last, uint32 [1 + k, W]; how many
        drafts, from the first, are allowed). Beyond those the masks are zero."""
        masks = np.zeros((1 + len(drafts), -(-self._vocab_size // 32)), np.uint32)
        masks[0] = self._mask()
        count = 0
        for draft in drafts:
            allowed = masks[count, draft // 32] >> np.uint32(draft % 32) & np.uint32(1)
            if not allowed or draft in self._eos_ids or not self._inner.consume_token(draft):
                break
            count += 1
            masks[count] = self._mask()
        if count:
            self._inner.rollback(count)
        return masks, count

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens follow."""
        for token in token_ids:
            if self._ended or token in self._eos_ids or not self._inner.consume_token(token):
                self._ended = True

    def _mask(self) -> np.ndarray:
        num_words = -(-self._vocab_size // 32)
        if self._ended or self._inner.is_error():
            return np.zeros(num_words, np.uint32)
        mask = np.frombuffer(self._inner.compute_bitmask(), "<u4")[:num_words].copy()
        if self._vocab_size % 32:
            mask[-1] &= np.uint32((1 << self._vocab_size % 32) - 1)
        return mask


class Busy(UsageError):
    """Nothing is known of the grammar: there was no time to try it."""


class _Compiler:
    """One tokenizer's grammars, the ones used last at hand."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]):
        tokens, special = token_bytes(tokenizer)
        self._vocab_size = len(tokens)
        eos_ids = [i for i in eos_ids if i < len(tokens)]
        if not eos_ids:  # an end that is never sampled: a text that is complete just ends
            eos_ids = [len(tokens)]
            tokens = [*tokens, b"<eos>"]
        self._eos_ids = frozenset(eos_ids)
        vocabulary = (tokens, sorted({*special, *eos_ids}), list(eos_ids))
        self._tokenizer: LLTokenizer = make_tokenizer(*vocabulary, tokenizer.encode)
        self._checkers = Checkers(*vocabulary)
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Grammar | str] = OrderedDict()  # or why it is refused

    def compile(self, structured: StructuredOutputsParams) -> Grammar:
        kind, text = _source(structured)
        with self._lock:
            found = self._cache.get(text)
            if found is not None:
                self._cache.move_to_end(text)
        if found is None:
            found, is_lasting = self._try(text)
            if is_lasting:
                with self._lock:
                    self._cache[text] = found
                    while len(self._cache) > _CACHED:
                        self._cache.popitem(last=False)
        if isinstance(found, str):
            raise UsageError(f"{kind} cannot be followed: {found}")
        return found

    def _try(self, text: str) -> tuple[Grammar | str, bool]:
        checked = self._checkers.check(text)
        if checked is None:
            raise Busy("other structures are being tried")
        fault, is_lasting = checked
        if fault is not None:
            return _one_line(fault), is_lasting
        return Grammar(start(self._tokenizer, text), self._eos_ids, self._vocab_size), True


_compilers_lock = threading.Lock()


def prepare(tokenizer: Tokenizer, eos_ids: Sequence[int] | None = None) -> None:
    """Do beforehand what a tokenizer's first grammar waits for: seconds for a large vocabulary."""
    _compiler(tokenizer, eos_ids).compile(StructuredOutputsParams(json_object=True))


def compile(
    structured: StructuredOutputsParams, tokenizer: Tokenizer, eos_ids: Sequence[int] | None = None
) -> Grammar:
    """The grammar of a structured output, for texts of `tokenizer`; from any thread.

    eos_ids: Tokens that end a text; the tokenizer's one by default. Raises UsageError, within
    seconds, for a grammar that is wrong, too large or too slow, and Busy where others are.
    """
    return _compiler(tokenizer, eos_ids).compile(structured)


def _compiler(tokenizer: Tokenizer, eos_ids: Sequence[int] | None) -> _Compiler:
    if eos_ids is None:
        eos_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    with _compilers_lock:
        return _compilers(tokenizer, tuple(eos_ids))


_compilers = lru_cache(maxsize=4)(_Compiler)


def _source(structured: StructuredOutputsParams) -> tuple[str, str]:
    """(what it is, the grammar in llguidance's form)."""
    if structured.regex is not None:
        kind, text, make = "the regex", structured.regex, LLMatcher.grammar_from_regex
    elif structured.grammar is not None:
        kind, text, make = "the grammar", structured.grammar, LLMatcher.grammar_from_lark
    elif structured.choice is not None:
        text = "|".join(f"(?:{_literal(choice)})" for choice in structured.choice)
        kind, make = "the choice", LLMatcher.grammar_from_regex
    else:
        kind, make = "the JSON schema", partial(_of_schema, structured)
        text = '{"type": "object"}' if structured.json is None else schema_text(structured.json)
    try:
        size = len(text.encode()) + len((structured.whitespace_pattern or "").encode())
    except UnicodeEncodeError:
        raise UsageError(f"{kind} holds half of a surrogate pair; spell the character") from None
    if size > MAX_BYTES:
        raise UsageError(f"{kind} has {size} bytes; at most {MAX_BYTES} are allowed")
    try:
        return kind, make(text)
    except ValueError as error:  # of a schema: nested deeper than llguidance reads
        raise UsageError(f"{kind} cannot be followed: {_one_line(str(error))}") from None


def _of_schema(structured: StructuredOutputsParams, schema: str) -> str:
    spaces: Any = {}
    if structured.whitespace_pattern is not None:
        spaces["whitespace_pattern"] = structured.whitespace_pattern
    elif structured.disable_any_whitespace:
        spaces["whitespace_flexible"] = False
    return LLMatcher.grammar_from_json_schema(schema, overrides=spaces)


def _literal(text: str) -> str:
    """A regex for exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _one_line(reason: str) -> str:
    """The first line of a reason, and of what follows the line that says the error."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    lines = lines[:1] + [line for line in lines[1:] if line.startswith("error:")]
    text = " ".join(lines)
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + " ..."
