"""The sampling that a model's own file asks for."""

import json

import pytest

from jaxdist.config import UsageError
from jaxdist.inference.sampling.generation_config import described, sampling_defaults


def test_what_the_file_says_is_taken_and_nothing_else():
    told = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": None,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "eos_token_id": [1, 2],
        "transformers_version": "4.37.0",
    }  # Qwen2.5's, and a most
    defaults = sampling_defaults({"generation_config.json": json.dumps(told).encode()})
    assert defaults == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }
    assert "temperature=0.7, top_p=0.8, top_k=20" in described(defaults)
    assert sampling_defaults({}) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "generation_config.json: "),
        (b"[]", "it holds no object"),
        (b"\xff", "generation_config.json: "),
        (b'{"a":' * 100_000, "generation_config.json: "),
        (b'{"temperature": -1}', "temperature=-1 must be at least 0"),
        (b'{"top_p": "much"}', "top_p"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_fix(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        sampling_defaults({"generation_config.json": text})
    assert "--generation-config none" in str(caught.value) and "\n" not in str(caught.value)
