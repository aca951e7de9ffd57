"""Thoughts are free and what follows them is held to its grammar, however the marks are spelled."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from jaxdist.data.tokenizer import JsonTokenizer
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.guidance.thoughts import BEGIN, END, Marks, Opening, ThinkingMatcher
from jaxdist.inference.sampling.sampling_params import SamplingParams, StructuredOutputsParams
from tests.inference.fake_runner import FakeRunner

TOKENS = [
    *(
        b"<",
        b"think>",
        b"<think>",
        b"<th",
        b"ink>",
        b"</think>",
        b"</",
        b"think",
        b">",
        b">\n",
        b"x",
        b"",
    ),
    *(
        b"{",
        b"}",
        b"ab",
        b"a",
        b"b",
        b"/think>{",
        b"</think>{",
        b"</thi",
        b"nk>",
        b"nk>{",
        b"<<",
        b"</</",
    ),
]
MARKS = Marks(TOKENS)
ANSWERS = ["{ab}", "<a", "<think>ab"]  # the last two begin as thoughts do


def allowed(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


class Literal:
    """A grammar of one text."""

    def __init__(self, text: str):
        self.text = text.encode()

    def matcher(self) -> "LiteralMatcher":
        return LiteralMatcher(self.text)


class LiteralMatcher:
    """`left` must follow; None where something else did."""

    def __init__(self, left: bytes):
        self.left: bytes | None = left

    @property
    def is_complete(self) -> bool:
        return self.left == b""

    @property
    def is_finished(self) -> bool:
        return not self.left

    def masks(self, drafts: Sequence[int] = ()) -> tuple[np.ndarray, int]:
        rows, there = [fits(self.left)], LiteralMatcher(self.left or b"")
        for draft in drafts:
            if not rows[-1][draft]:
                break
            there.advance([draft])
            rows.append(fits(there.left))
        bits = np.pad(np.stack(rows), [(0, 0), (0, -len(TOKENS) % 32)])
        return np.packbits(bits, axis=-1, bitorder="little").view("<u4"), len(rows) - 1

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            fine = self.left is not None and fits(self.left)[token]
            self.left = self.left[len(TOKENS[token]) :] if fine and self.left else None


def fits(left: bytes | None) -> np.ndarray:
    return np.array([bool(t and left and left.startswith(t)) for t in TOKENS])


def expected(written: bytes, answer: bytes, opening: Opening) -> set[int]:
    """What may follow, from the whole text."""
    begin, end = BEGIN.encode(), END.encode()
    if opening is Opening.BEFORE and written.startswith(begin):
        opening, written = Opening.INSIDE, written.removeprefix(begin)
    if opening is Opening.INSIDE and end not in written:
        over = (t for t, text in enumerate(TOKENS) if (written + text).partition(end)[2])
        return {*range(len(TOKENS))} - {*over}
    follows = {}
    if opening is Opening.INSIDE:
        written = written.partition(end)[2]
    elif opening is Opening.BEFORE:
        follows = {t for t, text in enumerate(TOKENS) if text and begin.startswith(written + text)}
    left = answer[len(written) :] if answer.startswith(written) else None
    return {*np.flatnonzero(fits(left)).tolist(), *follows}


@given(data=st.data(), answer=st.sampled_from(ANSWERS), opening=st.sampled_from(Opening))
def test_masks_are_those_of_the_whole_text(data, answer, opening):
    matcher, written = ThinkingMatcher(Literal(answer), MARKS, opening), b""
    for _ in range(20):
        drafts = data.draw(st.lists(st.integers(0, len(TOKENS) - 1), max_size=4))
        for _ in range(2):  # looking ahead changes nothing
            masks, count = matcher.masks(drafts)
            assert len(masks) == count + 1
            ahead = written
            for i, row in enumerate(masks):
                assert allowed(row) == expected(ahead, answer.encode(), opening)
                if i < count:
                    assert drafts[i] in allowed(row)
                    ahead += TOKENS[drafts[i]]
        choice = sorted(allowed(masks[0]))
        assert matcher.is_finished == (not choice)
        if not choice:
            break
        wanted = [t for t in choice if t in drafts] or choice
        token = data.draw(st.sampled_from(wanted))
        matcher.advance([token])
        written += TOKENS[token]


def test_what_spells_both_an_answer_and_thoughts_waits_for_neither():
    matcher = ThinkingMatcher(Literal("<"), MARKS, Opening.BEFORE)
    matcher.advance([TOKENS.index(b"<")])
    assert matcher.is_finished  # it is an answer, whatever could be made of it
    matcher = ThinkingMatcher(Literal("<think>ab"), MARKS, Opening.BEFORE)
    matcher.advance([TOKENS.index(b"<think>"), TOKENS.index(b"ab")])
    assert not matcher.is_finished  # it thinks
    matcher.advance([TOKENS.index(b"</think>")])
    assert allowed(matcher.masks()[0][0]) == expected(b"", b"<think>ab", Opening.AFTER)


@pytest.fixture(scope="module")
def tokenizer() -> JsonTokenizer:
    """A token a byte, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([BEGIN, END, "<eos>"])
    return JsonTokenizer(
        inner, name="t", eos_id=inner.token_to_id("<eos>"), bos_id=None, fingerprint="t"
    )


WISHES = {
    "choice": StructuredOutputsParams(choice=["ab", "ba", "bab"]),
    "regex": StructuredOutputsParams(regex="[a-c]{5}"),
    "free": None,
}
LATER = {"together": {}, "guesses": {"num_speculative_tokens": 4, "prompt_lookup_min": 1}}


def write(tokenizer, together: bool, **options) -> tuple[dict[str, list], Engine]:
    """(tokens, text, end) of each answer by request, and the engine that wrote them."""
    marks = [tokenizer._inner.token_to_id(mark) for mark in (BEGIN, END)]
    words = [*marks, *tokenizer.encode("abcdefg")]
    runner = FakeRunner(
        vocab_size=tokenizer.vocab_size, words=words, num_blocks=24, max_model_len=80
    )
    engine, last = Engine(runner, tokenizer, EngineOptions(**options)), {}
    for name, wish in WISHES.items():
        for opening in Opening:
            for seed in range(3):
                params = SamplingParams(
                    seed=seed,
                    n=2,
                    max_tokens=60,
                    skip_special_tokens=False,
                    structured_outputs=wish,
                )
                request = f"{name} {opening.name} {seed}"
                engine.add_request(request, [97, 98, 97, 98, seed], params, opening=opening)
                while engine.has_unfinished_requests() and not together:
                    last |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    told = {
        name: [(list(one.token_ids), one.text, one.finish_reason) for one in output.outputs]
        for name, output in last.items()
    }
    return told, engine


@pytest.fixture(scope="module")
def alone(tokenizer):
    pytest.importorskip("llguidance")
    return write(tokenizer, together=False, run_ahead=False, enable_prefix_caching=False)[0]


def test_answers_conform_after_thoughts_that_are_free(alone):
    conforms = {"choice": re.compile("ab|ba|bab"), "regex": re.compile("[a-c]{5}")}
    thoughtful = set()
    for name, outputs in alone.items():
        wish, opening, _ = name.split()
        for _, text, reason in outputs:
            if wish == "free" or reason == "length":
                continue
            if opening == "INSIDE" or (opening == "BEFORE" and text.startswith(BEGIN)):
                thoughts, mark, text = text.partition(END)
                assert mark
                thoughtful |= {opening} if re.search("[d-g]", thoughts) else set()
            assert conforms[wish].fullmatch(text)
    assert thoughtful == {"INSIDE", "BEFORE"}


@pytest.mark.parametrize("way", LATER)
def test_every_way_writes_what_each_writes_alone(way, tokenizer, alone):
    told, engine = write(tokenizer, together=True, **LATER[way])
    assert told == alone
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.counters.num_accepted_tokens > 0) == (way == "guesses")
