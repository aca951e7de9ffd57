"""Grammars and bad words through the engine: what comes out conforms, with guesses and without."""

import json

import numpy as np
import pytest

from jaxdist.data.tokenizer import BytesTokenizer
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.errors import RequestError
from jaxdist.inference.guidance.guide import Guide, bad_word_ids
from jaxdist.inference.guidance.speculation import NgramIndex
from jaxdist.inference.sampling.sampling_params import SamplingParams, StructuredOutputsParams
from tests.inference.fake_runner import FakeRunner


def allowed(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_bad_words_are_banned_where_they_would_end():
    guide = Guide(
        vocab_size=40,
        bad_words=[(1,), (2, 3), (4, 5, 6)],
        ngrams=NgramIndex(1, 1),
        most_drafts=3,
    )
    shape = guide.shape([9, 4, 5, 6, 9, 4], 4, 3)
    assert shape is not None and shape[1] is not None
    drafts = shape[0]
    assert list(drafts) == [5, 6, 9]
    banned = [set(range(40)) - allowed(row) for row in shape[1]]
    # The prompt's own words count for nothing; a draft that is bad is refused at its place.
    assert banned == [{1}, {1, 6}, {1}, {1}]
    assert guide.guesses and guide.follows
    static = Guide(vocab_size=40, bad_words=[(1,)])
    assert not static.guesses and not static.follows


def test_a_word_is_spelled_with_and_without_a_space():
    assert bad_word_ids([" ab", "c"], BytesTokenizer()) == [
        tuple(b"ab"),
        tuple(b" ab"),
        tuple(b"c"),
        tuple(b" c"),
    ]


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("eos_ids", [[256], []])
def test_structured_texts_conform_beside_free_ones_and_do_not_hold_them_up(drafts, eos_ids):
    pytest.importorskip("llguidance")
    ahead, steps = write(drafts, eos_ids, run_ahead=True)
    assert ahead == write(drafts, eos_ids, run_ahead=False)[0]
    # Nor does a guess that completes a text count the end after it, which is not sampled else.
    assert ahead == write(0, eos_ids, run_ahead=False)[0]
    # Each step but the first was launched before the results of the last; guesses need those.
    assert steps.num_ahead == (0 if drafts else steps.num_steps - 1)


def write(drafts: int, eos_ids: list[int], run_ahead: bool) -> tuple[dict, FakeRunner]:
    """Tokens by request, which conform; the runner that made them."""
    options = EngineOptions(num_speculative_tokens=drafts, prompt_lookup_min=1, run_ahead=run_ahead)
    runner = FakeRunner(max_model_len=200)
    engine = Engine(runner, BytesTokenizer(), options, eos_ids=eos_ids)
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wishes = {
        "json": StructuredOutputsParams(json=schema),
        "choice": StructuredOutputsParams(choice=["yes", "no", "yes and no"]),
        "regex": StructuredOutputsParams(regex="[a-c]{5}"),
    }
    params = {
        name: SamplingParams(seed=3, n=3, max_tokens=120, structured_outputs=wish)
        for name, wish in wishes.items()
    }
    params["free"] = SamplingParams(seed=1, max_tokens=150, ignore_eos=True)
    params["tamed"] = SamplingParams(seed=1, max_tokens=50, bad_words=["ab", "xyz"])
    for name, one in params.items():
        engine.add_request(name, "abc", one)
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    assert len(last["free"].outputs[0].token_ids) == 150
    done = {
        name: [one.text for one in last[name].outputs if one.finish_reason == "stop"]
        for name in wishes
    }
    assert len(done["choice"]) == len(done["regex"]) == 3
    assert all(set(json.loads(text)) == {"a", "b"} for text in done["json"])
    assert set(done["choice"]) <= {"yes", "no", "yes and no"}
    assert all(len(text) == 5 and set(text) <= set("abc") for text in done["regex"])
    tokens = {name: [list(one.token_ids) for one in out.outputs] for name, out in last.items()}
    return tokens, runner


def test_a_grammar_that_is_wrong_is_refused():
    pytest.importorskip("llguidance")
    engine = Engine(FakeRunner(), BytesTokenizer())
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a"))
    with pytest.raises(RequestError, match="regex cannot be followed") as caught:
        engine.prepare("r", "abc", params)
    assert caught.value.param == "structured_outputs"
