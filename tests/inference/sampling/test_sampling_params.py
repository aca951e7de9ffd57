"""Bad parameters are refused in one line that names the field."""

import math
from time import process_time
from typing import Any

import pytest

from jaxdist.config import UsageError
from jaxdist.inference.sampling.sampling_params import (
    LOGIT_BIASES,
    MAX_BAD_WORDS,
    MAX_IDS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    SamplingParams,
    StructuredOutputsParams,
)

NUMBERS = ["temperature", "top_p", "min_p", "typical_p", "repetition_penalty"]
NUMBERS += ["presence_penalty", "frequency_penalty"]
WHOLES = "n top_k seed min_tokens max_tokens logprobs prompt_logprobs".split()
OUT_OF_RANGE = {
    "n": [0, -1, MAX_N + 1],
    "temperature": [-0.1, 1e39],
    "top_p": [0, -1, 1.01],
    "top_k": [-2, 2**31],
    "min_p": [-0.1, 1.1],
    "typical_p": [0, 1.1],
    "repetition_penalty": [0, -1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "seed": [2**64, -(2**63) - 1],
    "min_tokens": [-1, 17],
    "max_tokens": [0, -1],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "logit_bias": [{1: 101}, {1: math.nan}, {-1: 1}, {1.5: 1}, {"1": 1}, [1], {True: 1}]
    + [dict.fromkeys(range(LOGIT_BIASES + 1), 1)],
    "allowed_token_ids": [[], [-1], [True], [0.5], "12", 3],
    "stop_token_ids": [[-1], [2**31], "12", 3],
    "stop": ["", 1, [""], [1], ["x"] * (MAX_STOPS + 1), ["x" * (MAX_STOP_LENGTH + 1)]],
    "bad_words": ["word", [""], [None], ["x"] * (MAX_BAD_WORDS + 1)],
    "ignore_eos": [1, "true", None],
    "include_stop_str_in_output": [0],
    "skip_special_tokens": ["no"],
    "structured_outputs": [{"json": {}}, "json"],
}
CASES = [
    *((name, value) for name, values in OUT_OF_RANGE.items() for value in values),
    *((name, value) for name in NUMBERS for value in (math.nan, math.inf, -math.inf, True, "1")),
    *((name, value) for name in WHOLES for value in (1.0, True, "1", math.nan)),
]


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda x: str(x)[:20])
def test_refused(name: str, value: Any):
    with pytest.raises(UsageError) as refused:
        SamplingParams(**{name: value})
    said = str(refused.value)
    assert name in said and "\n" not in said and len(said) < 1200


def test_accepted_at_the_borders():
    SamplingParams()
    SamplingParams(
        n=MAX_N,
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=1,
        typical_p=1,
        repetition_penalty=0.01,
        presence_penalty=-2,
        frequency_penalty=2.0,
        seed=-(2**63),
        logit_bias={0: -100, 5: 100},
        allowed_token_ids=[0],
        stop=["x"] * MAX_STOPS,
        stop_token_ids=(7,),
        min_tokens=3,
        max_tokens=3,
        logprobs=0,
        prompt_logprobs=20,
    )
    SamplingParams(seed=2**64 - 1, max_tokens=None, min_tokens=1000)


def test_one_stop_may_be_a_text_and_none_is_no_list():
    assert SamplingParams(stop="end") == SamplingParams(stop=("end",))
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()


def test_long_lists_are_checked_fast_and_once():
    ids = list(range(MAX_IDS // 4))
    began = process_time()
    params = SamplingParams(allowed_token_ids=ids, stop_token_ids=ids)
    params.check_against(len(ids))
    for seed in range(MAX_N):
        assert params.varied(seed=seed).seed == seed
    assert process_time() - began < 0.5  # an id at a time takes ten
    assert params.seed is None
    with pytest.raises(UsageError, match="allowed_token_ids has 12 entries; .* at most 10"):
        SamplingParams(allowed_token_ids=[*range(10), 0, 0]).check_against(10)


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {10: 1.0}}, {"allowed_token_ids": [3, 10]}, {"stop_token_ids": [10]}],
    ids=lambda params: next(iter(params)),
)
def test_ids_beyond_the_vocabulary_are_refused(params: dict[str, Any]):
    SamplingParams(**params).check_against(11)
    with pytest.raises(UsageError, match=f"{next(iter(params))} .* 10; .* 0 to 9"):
        SamplingParams(**params).check_against(10)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": 3},
        {"json": [1]},
        {"json_object": 1},
        {"json_object": True, "choice": ["a"]},
        {"regex": ""},
        {"regex": 1},
        {"grammar": b"start: /a/"},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", ""]},
        {"choice": [1]},
    ],
    ids=str,
)
def test_a_structure_is_exactly_one(fields: dict[str, Any]):
    with pytest.raises(UsageError):
        StructuredOutputsParams(**fields)
