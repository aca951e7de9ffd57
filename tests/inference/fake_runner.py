"""A runner without a device: each token is a hash of the tokens before it, read from its blocks.

The blocks hold, for each position, the hash of the text up to there; a row continues from what the
block table leads to. A wrong block, a block reused too early or a wrong position changes the
output or fails an assertion. Steps run when they are waited for, in order, as on a device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.scheduling.step import PENDING, NewSequence, Row, RowResult, TokenLogprobs

_MODULUS = (1 << 61) - 1


def extend(text_hash: int, token: int) -> int:
    """The hash of a text and one token more."""
    return (text_hash * 1_000_003 + token + 7) % _MODULUS


def sample(
    text_hash: int,
    params: SamplingParams,
    position: int,
    words: Sequence[int],
    mask: np.ndarray | None,
) -> int:
    """The token at `position`, a function of text, seed and position, within what is allowed."""
    seed = 0 if params.temperature == 0 else (params.seed or 0) * 31 + position
    allowed = words
    if params.allowed_token_ids is not None:
        allowed = [w for w in allowed if w in set(params.allowed_token_ids)] or list(
            params.allowed_token_ids
        )
    if mask is not None:
        inside = [w for w in allowed if mask[w // 32] >> np.uint32(w % 32) & 1]
        if not inside:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            inside = np.flatnonzero(bits).tolist()
        allowed = inside
        assert allowed, "a mask allows nothing"
    return allowed[extend(extend(text_hash, seed), 5) % _MODULUS % len(allowed)]


def expected(
    prompt: Sequence[int],
    params: SamplingParams,
    count: int,
    words: Sequence[int],
    mask: Callable[[Sequence[int]], np.ndarray | None] = lambda text: None,
) -> list[int]:
    """The first `count` tokens that follow `prompt` where nothing ends them.

    mask: What is allowed after a text.
    """
    text_hash, out = 0, []
    for token in prompt:
        text_hash = extend(text_hash, token)
    for i in range(count):
        allowed = mask([*prompt, *out])
        out.append(sample(text_hash, params, len(prompt) + i, words, allowed))
        text_hash = extend(text_hash, out[-1])
    return out


@dataclass
class _Slot:
    sequence: NewSequence
    tokens: list[int]
    sampled: int | None = None
    rows: list = field(default_factory=list)


class FakeRunner:
    """As `jaxdist.inference.scheduling.step.Runner`.

    words: Tokens that it samples; by default all. script: What it writes instead, token by token,
    as long as that is allowed. delay: called in each `wait`, to take time or to fail. checked:
    assert all that the engine promises; off for timing.
    """

    hidden_size = 8

    def __init__(
        self,
        *,
        vocab_size: int = 257,
        block_size: int = 4,
        num_blocks: int = 65,
        num_replicas: int = 1,
        max_num_seqs: int = 8,
        max_model_len: int = 256,
        max_row_tokens: int = 32,
        words: Sequence[int] | None = None,
        script: Sequence[int] = (),
        delay=None,
        checked: bool = True,
    ):
        self.vocab_size, self.block_size, self.num_blocks = vocab_size, block_size, num_blocks
        self.num_replicas, self.max_num_seqs = num_replicas, max_num_seqs
        self.max_model_len, self.max_row_tokens = max_model_len, max_row_tokens
        self.words = range(vocab_size) if words is None else list(words)
        self.num_steps = self.num_ahead = 0  # ahead: launched before the last one was waited for
        self.slots: dict[int, _Slot] = {}
        self._script, self._delay, self._checked = script, delay, checked
        share = max_num_seqs // num_replicas
        self._replica_of = [slot // share for slot in range(share * num_replicas)]
        self._hashes = [[0] * (num_blocks * block_size) for _ in range(num_replicas)]
        self._queue: list[tuple[list[tuple[Row, _Slot]], list[RowResult]]] = []

    def start(self, slot: int, sequence: NewSequence) -> None:
        assert slot not in self.slots, f"slot {slot} is taken"
        assert 0 <= slot < self.max_num_seqs
        assert sequence.pooling or sequence.params.seed is not None
        self.slots[slot] = _Slot(sequence, [*sequence.prompt_ids, *sequence.output_ids])

    def stop(self, slot: int) -> None:
        del self.slots[slot]

    def launch(self, rows: Sequence[Row]):
        self.num_steps += 1
        self.num_ahead += bool(self._queue)
        assert rows, "an empty step"
        if self._checked:
            self._check(rows)
        # What the host changes later must not be seen by the step.
        held = [
            (
                replace(r, token_ids=list(r.token_ids), block_table=list(r.block_table)),
                self.slots[r.slot],
            )
            for r in rows
        ]
        entry = (held, [])
        self._queue.append(entry)
        return entry

    def sample(self, launched, masks: Mapping[int, np.ndarray | None]) -> None:
        rows, _ = launched
        assert set(masks) == {i for i, (row, _) in enumerate(rows) if row.masks_follow}
        for i, mask in masks.items():
            row, slot = rows[i]
            rows[i] = replace(row, masks=mask, masks_follow=False), slot
            self._check_masks(rows[i][0])

    def wait(self, launched) -> list[RowResult]:
        assert self._queue, "nothing was launched"
        while True:
            rows, results = entry = self._queue.pop(0)
            if self._delay is not None:
                self._delay()
            results += [self._run(row, slot) for row, slot in rows]
            if entry is launched:
                return results

    def stats(self) -> Mapping[str, float]:
        return {"num_compilations": 0, "padding_ratio": 0.0}

    def _check(self, rows: Sequence[Row]) -> None:
        assert len({row.slot for row in rows}) == len(rows), "a slot has two rows"
        writes = set()
        for row in rows:
            replica, table, size = self._replica_of[row.slot], row.block_table, self.block_size
            assert row.slot in self.slots, f"slot {row.slot} was not started"
            assert 1 <= len(row.token_ids) <= self.max_row_tokens
            end = row.position + len(row.token_ids)
            assert end <= self.max_model_len and end <= len(table) * size
            assert all(0 < block < self.num_blocks for block in table), "a block out of range"
            assert len(set(table)) == len(table), "a block twice in a table"
            for i in range(row.position // size, -(-end // size)):
                assert (replica, table[i]) not in writes, "two rows write to one block"
                writes.add((replica, table[i]))
            self._check_masks(row)
            assert not row.masks_follow or (PENDING in row.token_ids and row.masks is None)
            assert all(t == PENDING or 0 <= t < self.vocab_size for t in row.token_ids)
            assert PENDING not in row.token_ids or len(row.token_ids) == 1

    def _check_masks(self, row: Row) -> None:
        if row.masks is not None:
            assert row.masks.shape == (row.num_drafts + 1, -(-self.vocab_size // 32))
            assert row.masks.dtype == np.uint32

    def _run(self, row: Row, slot: _Slot) -> RowResult:
        assert not row.masks_follow, "sampled before its masks came"
        hashes, size = self._hashes[self._replica_of[row.slot]], self.block_size
        params = slot.sequence.params
        prompt = slot.sequence.prompt_ids
        tokens = list(row.token_ids)
        if tokens == [PENDING]:
            assert slot.sampled is not None, "nothing was sampled yet"
            tokens = [slot.sampled]
        text_hash, places = 0, []
        if row.position:
            before = row.position - 1
            text_hash = hashes[row.block_table[before // size] * size + before % size]
        ends = []
        for i, token in enumerate(tokens, row.position):
            if self._checked and i < len(slot.tokens) and not row.num_drafts:
                assert slot.tokens[i] == token, "a token that the sequence does not have"
            text_hash = extend(text_hash, token)
            hashes[row.block_table[i // size] * size + i % size] = text_hash
            ends.append(text_hash)
            places.append(i)
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not slot.sequence.pooling:
            prompt_logprobs = [
                self._logprobs(prompt[i + 1], ends[i - row.position], params.prompt_logprobs)
                for i in places
                if i + 1 < len(prompt)
            ]
        if not row.sample:
            hidden = None
            if slot.sequence.pooling and places[-1] + 1 == len(prompt):
                hidden = (
                    np.random.default_rng(ends[-1]).normal(size=self.hidden_size).astype(np.float32)
                )
            return RowResult(prompt_logprobs=prompt_logprobs, hidden=hidden)
        first, out = len(tokens) - 1 - row.num_drafts, []
        for j in range(row.num_drafts + 1):
            at = first + j
            mask = None if row.masks is None else row.masks[j]
            words = self._wished(places[at] + 1 - len(prompt), mask)
            token = sample(ends[at], params, places[at] + 1, words, mask)
            out.append(token)
            if j < row.num_drafts and tokens[at + 1] != token:
                break
        if self._checked:
            slot.tokens[places[first] + 1 :] = out
        slot.sampled = out[-1]
        logprobs = None
        if params.logprobs is not None:
            logprobs = [
                self._logprobs(t, ends[first + j], params.logprobs) for j, t in enumerate(out)
            ]
        return RowResult(token_ids=out, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _wished(self, index: int, mask: np.ndarray | None) -> Sequence[int]:
        """What the output's token `index` is drawn from."""
        wish = self._script[index] if index < len(self._script) else None
        if wish is None or (mask is not None and not mask[wish // 32] >> np.uint32(wish % 32) & 1):
            return self.words
        return [wish]

    def _logprobs(self, chosen: int, text_hash: int, count: int) -> TokenLogprobs:
        top = [(text_hash + i) % self.vocab_size for i in range(count)]
        return TokenLogprobs(
            chosen=-(text_hash % 1000) / 100,
            rank=1 + text_hash % 5,
            top_ids=top,
            top_logprobs=[-0.5 * (i + 1) for i in range(count)],
        )
