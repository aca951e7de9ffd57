"""The engine over a runner without a device: whatever happens, a text is what it is alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxdist.config import UsageError
from jaxdist.data.tokenizer import BytesTokenizer
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.errors import RequestError
from jaxdist.inference.guidance.guide import Guide, bad_word_ids
from jaxdist.inference.preparation import child_seed
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.scheduling.request import Status
from tests.inference.fake_runner import FakeRunner, expected

EOS = 256
WORDS = [*b"ab ", EOS]


def finish(engine: Engine, most: int = 100_000):
    """Run to the end; last outputs by request id."""
    last = {}
    for _ in range(most):
        if not engine.has_unfinished_requests():
            return last
        for output in engine.step():
            last[output.request_id] = output
        engine.check_integrity()
    raise AssertionError(f"not ended after {most} steps")


def alone(prompt, params, seed, eos=EOS, words=WORDS):
    """(tokens, finish reason) as the plain definition of sampling says."""
    params = replace(params, seed=seed)
    guide = Guide(vocab_size=257, bad_words=bad_word_ids(params.bad_words, BytesTokenizer()))

    def mask(text):
        return guide.shape(text, len(prompt), 0)[1][0] if params.bad_words else None

    tokens = expected(prompt, params, params.max_tokens, words, mask)
    if eos in tokens and not params.ignore_eos:
        return tokens[: tokens.index(eos) + 1], "stop"
    return tokens, "length"


class Lives(RuleBasedStateMachine):
    """Requests of all kinds come, run and are aborted in small pools."""

    @initialize(
        num_blocks=st.sampled_from([11, 12, 14, 18, 40]),
        replicas=st.sampled_from([1, 2]),
        slots=st.integers(1, 4),
        row=st.integers(1, 9),
        budget=st.integers(4, 24),
        caching=st.booleans(),
        ahead=st.booleans(),
        policy=st.sampled_from(["fcfs", "lpm"]),
        drafts=st.sampled_from([0, 0, 3]),
    )
    def make(self, num_blocks, replicas, slots, row, budget, caching, ahead, policy, drafts):
        self.runner = FakeRunner(
            num_blocks=num_blocks,
            num_replicas=replicas,
            max_num_seqs=slots * replicas,
            max_row_tokens=row,
            max_model_len=40,
            words=WORDS,
        )
        options = EngineOptions(
            max_num_batched_tokens=max(budget, slots),
            enable_prefix_caching=caching,
            run_ahead=ahead,
            policy=policy,
            num_speculative_tokens=drafts,
            prompt_lookup_min=1,
            seed=0,
        )
        self.engine = Engine(self.runner, BytesTokenizer(), options)
        self.wanted: dict[str, tuple] = {}
        self.last: dict[str, Any] = {}
        self.aborted: set[str] = set()
        self.count = 0

    @rule(
        head=st.sampled_from(["", "aaaa", "aaaabbbb", "aaaabbbbabababab"]),
        tail=st.text("ab", min_size=1, max_size=6),
        count=st.integers(1, 16),
        n=st.sampled_from([1, 1, 1, 3]),
        temperature=st.sampled_from([0.0, 1.0]),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, "other"]),
        logprobs=st.sampled_from([None, None, 2]),
        bad_words=st.sampled_from([(), (), ("ab", "ba "), ("a",)]),
    )
    def add(
        self, head, tail, count, n, temperature, ignore_eos, priority, salt, logprobs, bad_words
    ):
        params = SamplingParams(
            n=n,
            max_tokens=count,
            temperature=temperature,
            seed=self.count,
            ignore_eos=ignore_eos,
            prompt_logprobs=logprobs,
            logprobs=logprobs,
            bad_words=bad_words,
        )
        name = str(self.count)
        self.engine.add_request(name, head + tail, params, priority=priority, cache_salt=salt)
        self.wanted[name] = (list((head + tail).encode()), params)
        self.count += 1

    @rule(first=st.integers(0, 9), many=st.integers(2, 5), priority=st.integers(0, 1))
    def add_more_than_fit(self, first, many, priority):
        params = SamplingParams(max_tokens=20, seed=self.count, ignore_eos=True)
        for i in range(many):
            name, text = str(self.count), "ab"[i % 2] * (first + i + 1)
            self.engine.add_request(name, text, params, priority=priority)
            self.wanted[name] = (list(text.encode()), params)
            self.count += 1

    @rule(text=st.text("ab", min_size=1, max_size=20), pooling=st.sampled_from(["mean", "last"]))
    def embed(self, text, pooling):
        name = str(self.count)
        self.engine.add_request(name, text, SamplingParams(), pooling=pooling)
        self.wanted[name] = (list(text.encode()), None)
        self.count += 1

    @rule(steps=st.integers(1, 6))
    def run(self, steps):
        for _ in range(steps):
            self._take(self.engine.step())
            self.engine.check_integrity()

    @rule(data=st.data())
    def abort(self, data):
        going = [
            name for name in self.wanted if name not in self.last or not self.last[name].finished
        ]
        if going:
            name = data.draw(st.sampled_from(going))
            output = self.engine.abort_request(name)
            assert output is not None and output.finished
            self.aborted.add(name)
            self.last[name] = output
            assert self.engine.abort_request(name) is None

    @invariant()
    def books_agree(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_unfinished_requests():
                break
            self._take(self.engine.step())
            self.engine.check_integrity()
        assert not self.engine.has_unfinished_requests(), "it goes on for ever"
        assert not self.runner.slots
        assert all(replica.num_used == 0 for replica in self.engine.stats().replicas)
        for name in self.wanted:
            assert self.last[name].finished
            self._check(name)

    def _take(self, outputs):
        for output in outputs:
            before = self.last.get(output.request_id)
            assert output.request_id not in self.aborted
            assert before is None or not before.finished
            if before is not None:
                for old, new in zip(before.outputs, output.outputs, strict=True):
                    assert new.text.startswith(old.text)
                    assert list(new.token_ids[: len(old.token_ids)]) == list(old.token_ids)
            self.last[output.request_id] = output

    def _check(self, name):
        prompt, params = self.wanted[name]
        output = self.last[name]
        assert list(output.prompt_token_ids) == prompt
        if params is None:
            assert (output.embedding is None) == (name in self.aborted)
            return
        for index, one in enumerate(output.outputs):
            tokens, reason = alone(prompt, params, child_seed(params.seed, index))
            if name in self.aborted and one.finish_reason == "abort":
                tokens = tokens[: len(one.token_ids)]
                reason = "abort"
            assert (list(one.token_ids), one.finish_reason) == (tokens, reason)
            assert one.text == BytesTokenizer().decode(tokens)
            if params.logprobs is not None:
                assert [next(iter(entry)) for entry in one.logprobs] == tokens
        if params.prompt_logprobs is not None and name not in self.aborted:
            assert output.prompt_logprobs[0] is None
            assert [next(iter(e)) for e in output.prompt_logprobs[1:]] == prompt[1:]


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def engine_of():
    def make(options=None, *, eos_ids=None, **fields):
        defaults: dict[str, Any] = {"words": [*b"abcdefgh "]}
        runner = FakeRunner(**defaults | fields)
        return Engine(runner, BytesTokenizer(), EngineOptions(**options or {}), eos_ids=eos_ids)

    return make


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code", "message"),
    [
        ("", {}, "prompt", None, "the prompt has no tokens; give at least one"),
        ([257], {}, "prompt", None, "ids reach from 257 to 257; .* has 0 to 256"),
        ([1.5], {}, "prompt", None, "must be whole numbers"),
        ([0] * 256, {}, "prompt", "context_length_exceeded", "length is 256 tokens, .* has 256"),
        (
            [0] * 250,
            {"max_tokens": 7},
            "max_tokens",
            "context_length_exceeded",
            "length is 256 tokens, and the request asks for 257 .* set max_tokens to at most 6",
        ),
        ("a", {"logit_bias": {257: 1}}, "logit_bias", None, "logit_bias names the token 257"),
        ("a", {"stop_token_ids": [999]}, "stop_token_ids", None, "token 999"),
        ("a", {"allowed_token_ids": [999]}, "allowed_token_ids", None, "token 999"),
    ],
)
def test_what_cannot_be_served_is_refused(engine_of, prompt, params, param, code, message):
    engine = engine_of()
    with pytest.raises(RequestError, match=message) as caught:
        engine.add_request("r", prompt, SamplingParams(**params))
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not engine.has_unfinished_requests()


def test_what_no_pool_holds_is_refused_and_the_rest_ends_at_its_size(engine_of):
    engine = engine_of(num_blocks=5, max_model_len=256)
    with pytest.raises(RequestError, match="the engine's blocks hold 16 tokens, .* has 16"):
        engine.add_request("r", [1] * 16)
    engine.add_request("r", [1] * 10, SamplingParams(max_tokens=None))
    assert len(finish(engine)["r"].outputs[0].token_ids) == 6


def test_an_answer_without_a_most_ends_where_the_engine_says_or_the_context_ends(engine_of):
    engine = engine_of({"default_max_tokens": 20})
    for length, min_tokens, count in ((10, 0, 20), (10, 30, 30), (250, 0, 6)):
        params = SamplingParams(max_tokens=None, min_tokens=min_tokens)
        engine.add_request("r", [1] * length, params)
        assert len(finish(engine)["r"].outputs[0].token_ids) == count
    engine.add_request("r", [1], SamplingParams(max_tokens=40))
    assert len(finish(engine)["r"].outputs[0].token_ids) == 40


def test_an_id_in_use_is_refused(engine_of):
    engine = engine_of()
    engine.add_request("r", "a")
    with pytest.raises(RequestError, match="a request with the id r is running"):
        engine.add_request("r", "a")


@pytest.mark.parametrize(
    "fields", [{"policy": "sjf"}, {"num_speculative_tokens": -1}, {"default_max_tokens": 0}]
)
def test_options_that_make_no_sense_are_refused(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        EngineOptions(**fields)
    with pytest.raises(UsageError, match="max_num_batched_tokens=4 is less than the 8 sequences"):
        EngineOptions(max_num_batched_tokens=4).token_budget(FakeRunner())


def test_the_n_differ_share_the_prompt_and_count_it_once(engine_of):
    engine = engine_of()
    engine.add_request("r", "a" * 17, SamplingParams(n=4, seed=3, max_tokens=8))
    output = finish(engine)["r"]
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert len({one.text for one in output.outputs}) == 4
    stats = engine.stats()
    assert stats.counters.prompt_tokens == 17
    assert stats.counters.generation_tokens == 32
    assert stats.prefix_hits == 3 * 16  # only the first computed the prompt's full blocks


def test_a_prefix_hit_saves_work_but_not_across_salts(engine_of):
    engine = engine_of()
    for salt, cached in ((None, 0), (None, 16), ("a", 0), ("a", 16)):
        engine.add_request("r", "a" * 20, SamplingParams(seed=1), cache_salt=salt)
        assert finish(engine)["r"].num_cached_tokens == cached
    off = engine_of({"enable_prefix_caching": False})
    for _ in range(2):
        off.add_request("r", "a" * 20, SamplingParams(seed=1))
        assert finish(off)["r"].num_cached_tokens == 0


def test_what_was_generated_is_cached_too(engine_of):
    engine = engine_of()
    engine.add_request("r", "abcd", SamplingParams(seed=1, max_tokens=13))
    output = finish(engine)["r"]
    conversation = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    engine.add_request("r", [*conversation, 1, 2, 3], SamplingParams(seed=1))
    assert finish(engine)["r"].num_cached_tokens == 16


@pytest.mark.parametrize("count", [1, 3])
def test_stop_texts_are_cut_out_in_any_mode(engine_of, count):
    engine = engine_of()
    engine.add_request("whole", "abc", SamplingParams(seed=5, max_tokens=40))
    text = finish(engine)["whole"].outputs[0].text
    stop = text[20 : 20 + count]
    where = text.index(stop)
    for include in (False, True):
        params = SamplingParams(
            seed=5, max_tokens=40, stop=[stop, "zz"], include_stop_str_in_output=include
        )
        engine.add_request("r", "abc", params)
        one = finish(engine)["r"].outputs[0]
        assert one.text == text[: where + count * include]
        assert (one.finish_reason, one.stop_reason) == ("stop", stop)
        assert len(one.token_ids) == where + count
    params = SamplingParams(seed=5, max_tokens=40, stop=[text[0]], min_tokens=10)
    engine.add_request("r", "abc", params)
    assert len(finish(engine)["r"].outputs[0].token_ids) == text.index(text[0], 10) + 1


def test_stop_tokens_end_the_text_and_are_not_in_it(engine_of):
    engine = engine_of(eos_ids={ord("c"), ord("h")})
    free = expected(list(b"xyz"), SamplingParams(seed=1), 40, [*b"abcdefgh "])
    engine.add_request("r", "xyz", SamplingParams(seed=1, max_tokens=40))
    one = finish(engine)["r"].outputs[0]
    end = min(free.index(ord("c")), free.index(ord("h")))
    assert one.text == bytes(free[:end]).decode() and list(one.token_ids) == free[: end + 1]
    assert (one.finish_reason, one.stop_reason) == ("stop", None)
    params = SamplingParams(seed=1, max_tokens=40, ignore_eos=True, stop_token_ids=[ord("a")])
    engine.add_request("r", "xyz", params)
    one = finish(engine)["r"].outputs[0]
    assert one.stop_reason == ord("a") and one.text == bytes(free[: free.index(ord("a"))]).decode()


@pytest.mark.parametrize("drafts", [0, 4])
def test_bad_words_do_not_appear(engine_of, drafts):
    engine = engine_of({"num_speculative_tokens": drafts, "prompt_lookup_min": 1})
    for seed in range(20):
        engine.add_request(
            str(seed), "abc", SamplingParams(seed=seed, max_tokens=60, bad_words=["ab", "c", "dea"])
        )
    text = " ".join(out.outputs[0].text for out in finish(engine).values())
    assert "ab" not in text and "c" not in text and "dea" not in text
    assert "de" in text and "a" in text


def test_where_nothing_may_follow_the_request_ends(engine_of):
    engine = engine_of({"num_speculative_tokens": 0}, vocab_size=32, words=range(32))
    for bad, count in (
        ([(i,) for i in range(32)], 0),
        ([(i, j) for i in range(32) for j in range(32)], 1),
    ):
        engine.add_request("r", [1, 2], SamplingParams(seed=0))
        (request,) = engine.scheduler.waiting
        request.guide = Guide(vocab_size=32, bad_words=bad)
        one = finish(engine)["r"].outputs[0]
        assert (one.finish_reason, len(one.token_ids)) == ("stop", count)


def test_guesses_save_steps_and_change_nothing(engine_of):
    counts = {}
    for drafts in (0, 4):
        engine = engine_of(
            {"num_speculative_tokens": drafts, "prompt_lookup_min": 1}, words=[*b"ab"]
        )
        params = SamplingParams(temperature=0, max_tokens=100)
        engine.add_request("r", "abab", params)
        one = finish(engine)["r"].outputs[0]
        assert list(one.token_ids) == expected(list(b"abab"), params, 100, [*b"ab"])
        counts[drafts] = engine.stats().counters.num_steps
        assert engine.stats().counters.num_accepted_tokens == 0 or drafts
    assert counts[4] < 0.8 * counts[0]


def test_the_first_is_never_sent_away_and_all_end(engine_of):
    engine = engine_of({"enable_prefix_caching": False}, num_blocks=17, max_num_seqs=8)
    for i in range(8):
        engine.add_request(str(i), [i] * 8, SamplingParams(seed=i, max_tokens=40))
    last = finish(engine, most=600)
    assert engine.stats().num_preemptions > 0
    assert last["0"].metrics.num_preemptions == 0
    for i in range(8):
        want = expected([i] * 8, SamplingParams(seed=i), 40, [*b"abcdefgh "])
        assert list(last[str(i)].outputs[0].token_ids) == want


def test_priorities_come_first(engine_of):
    engine = engine_of(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 5), ("c", 0)):
        engine.add_request(name, "abc", SamplingParams(seed=1, max_tokens=4), priority=priority)
    assert list(finish(engine)) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("lacking", "running"),
    [({"max_num_seqs": 2}, {"equal": 1, "less": 2}), ({"num_blocks": 17}, {"less" * 10: 2})],
)
def test_who_is_more_urgent_sends_others_away_but_not_its_equals(engine_of, lacking, running):
    engine = engine_of({"enable_prefix_caching": False}, **lacking)
    params = SamplingParams(seed=1, max_tokens=20)
    for text, priority in running.items():
        engine.add_request(text, text, params, priority=priority, stream=False)
    for _ in range(5):
        engine.step()
        engine.check_integrity()
    for text in ("urgent" * 4, "later" * 4):
        engine.add_request(text, text, params, priority=1, stream=False)
    last = finish(engine)
    *first, less = running
    assert list(last) == [*first, "urgent" * 4, "later" * 4, less]
    assert last[less].metrics.num_preemptions == 1
    assert all(last[name].metrics.num_preemptions == 0 for name in (*first, "urgent" * 4))
    for output in last.values():
        want = expected(output.prompt_token_ids, params, 20, [*b"abcdefgh "])
        assert list(output.outputs[0].token_ids) == want


def test_nobody_makes_way_in_vain(engine_of):
    engine = engine_of({"enable_prefix_caching": False}, num_blocks=17)
    params = SamplingParams(seed=1, max_tokens=6)
    engine.add_request("most", [1] * 48, params, priority=0)
    engine.add_request("less", [2] * 2, params, priority=2)
    engine.step()
    engine.add_request("large", [3] * 30, params, priority=1)  # has no room beside the first
    last = finish(engine)
    assert all(output.metrics.num_preemptions == 0 for output in last.values())


def may_enter(engine) -> Any:
    """The first that waits, where it has room once all of less priority are gone."""
    scheduler = engine.scheduler
    for request in scheduler.waiting[:1]:
        for replica in scheduler.replicas:
            lesser = [
                r
                for r in scheduler.running
                if r.replica == replica.index and r.order[0] > request.order[0]
            ]
            way = replica.cache.match(request.salt, request.tokens)
            if replica.can_admit(request, way, lesser):
                return request
    return None


@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 2),  # priority
            st.text("ab", min_size=1, max_size=20),
            st.integers(1, 16),  # tokens to write
            st.integers(0, 4),  # steps after it
        ),
        min_size=2,
        max_size=14,
    ),
    num_blocks=st.sampled_from([12, 16, 24]),
    slots=st.integers(1, 3),
    replicas=st.sampled_from([1, 2]),
    ahead=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_whoever_is_first_in_priority_runs_if_room_can_be_made(
    arrivals, num_blocks, slots, replicas, ahead
):
    runner = FakeRunner(
        num_blocks=num_blocks,
        num_replicas=replicas,
        max_num_seqs=slots * replicas,
        max_model_len=36,
        words=WORDS,
    )
    options = EngineOptions(max_num_batched_tokens=10_000, run_ahead=ahead, seed=0)
    engine = Engine(runner, BytesTokenizer(), options, eos_ids=())
    last: dict[str, Any] = {}
    began: dict[int, list[int]] = {0: [], 1: [], 2: []}  # arrivals, by priority
    kept_out = 0

    def step():
        nonlocal kept_out
        request = may_enter(engine)
        last.update((output.request_id, output) for output in engine.step())
        engine.check_integrity()
        # Those before it may grow in the meantime; then one more makes way in the next step.
        is_out = request is not None and request.status is Status.WAITING
        kept_out = kept_out + 1 if is_out else 0
        assert kept_out <= slots * replicas
        live = [*engine.scheduler.running, *engine.scheduler.waiting]
        for priority, arrival in sorted(r.order for r in live if r.num_cached_tokens >= 0):
            if arrival not in began[priority]:
                began[priority].append(arrival)

    for i, (priority, text, count, steps) in enumerate(arrivals):
        params = SamplingParams(seed=i, max_tokens=count)
        engine.add_request(str(i), text, params, priority=priority)
        for _ in range(steps):
            step()
    for _ in range(2000):
        if not engine.has_unfinished_requests():
            break
        step()
    for order in began.values():
        assert order == sorted(order), "an equal that came later began before"
    for i, (_, text, count, _) in enumerate(arrivals):
        tokens = list(last[str(i)].outputs[0].token_ids)
        assert tokens == expected(list(text.encode()), SamplingParams(seed=i), count, WORDS)


def test_longest_prefix_first_serves_what_is_cached(engine_of):
    engine = engine_of({"policy": "lpm"}, max_num_seqs=1)
    engine.add_request("warm", "a" * 20, SamplingParams(seed=1, max_tokens=4))
    finish(engine)
    for name, text in (("cold", "b" * 20), ("hot", "a" * 20)):
        engine.add_request(name, text, SamplingParams(seed=1, max_tokens=4))
    assert list(finish(engine)) == ["hot", "cold"]


def test_replicas_share_the_load_and_keep_to_their_prefixes(engine_of):
    engine = engine_of(num_replicas=2, max_num_seqs=8)
    for i in range(4):
        engine.add_request(str(i), [i] * 20, SamplingParams(seed=1, max_tokens=4))
    engine.step()
    assert [replica.num_running for replica in engine.stats().replicas] == [2, 2]
    finish(engine)
    for i in range(4):
        engine.add_request(str(i), [i] * 20, SamplingParams(seed=1, max_tokens=4))
    assert {out.num_cached_tokens for out in finish(engine).values()} == {16}


def test_only_the_last_output_is_made_where_no_stream_is_asked_for(engine_of):
    engine = engine_of()
    engine.add_request("r", "abc", SamplingParams(seed=1, max_tokens=9), stream=False)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs) == 1 and outputs[0].finished


def test_times_and_waste_are_told(engine_of):
    engine = engine_of()
    engine.add_request("r", "abcdef", SamplingParams(seed=1, max_tokens=9))
    engine.step()
    assert engine.stats().replicas[0].waste == pytest.approx(1 - 7 / 8)
    assert engine.block_maps()[0].tables[0][:2] == ("r", 0)
    metrics = finish(engine)["r"].metrics
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
        metrics.finished_time,
    ]
    assert times == sorted(times)


def test_an_embedding_is_the_same_in_chunks(engine_of):
    vectors = []
    for row in (32, 3):
        engine = engine_of(max_row_tokens=row)
        engine.add_request("r", "abcdefghij", pooling="mean")
        vectors.append(finish(engine)["r"].embedding)
    np.testing.assert_array_equal(*vectors)
