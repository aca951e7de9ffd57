"""From requests to the engine's parameters."""

import pytest

from jaxdist.inference.sampling.sampling_params import SamplingParams, StructuredOutputsParams
from jaxdist.server import sampling
from jaxdist.server.errors import APIError
from jaxdist.server.protocol import ChatRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def completion(**fields):
    return sampling.of_completion(CompletionRequest.model_validate({"prompt": "a"} | fields))


def chat(**fields):
    return sampling.of_chat(ChatRequest.model_validate(CHAT | fields))


def test_defaults_are_openais():
    assert completion() == SamplingParams(max_tokens=16)
    assert chat() == SamplingParams(max_tokens=None)


def test_the_models_own_defaults_give_way_to_the_request():
    defaults = {"temperature": 0.6, "top_p": 0.9}
    told = sampling.of_completion(CompletionRequest(prompt="a", temperature=0.0, top_k=3), defaults)
    assert told == SamplingParams(temperature=0.0, top_p=0.9, top_k=3)
    told = sampling.of_chat(ChatRequest.model_validate(CHAT), defaults=defaults)
    assert told == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=None)


def test_every_field_arrives():
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "typical_p": 0.8,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.2, "seed": 7,
        "allowed_token_ids": [1, 2], "bad_words": ["x"], "stop_token_ids": [3], "min_tokens": 1,
        "include_stop_str_in_output": True, "ignore_eos": True, "prompt_logprobs": 1,
        "skip_special_tokens": False,
    }  # fmt: skip
    told = completion(**fields, stop="z", logit_bias={"5": -1}, logprobs=3, max_tokens=9)
    expected = SamplingParams(**fields, stop=("z",), logit_bias={5: -1.0}, logprobs=3, max_tokens=9)
    assert told == expected


def test_max_completion_tokens_wins():
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_echo_scores_the_prompt():
    params = completion(echo=True, logprobs=2, max_tokens=0)
    assert (params.max_tokens, params.prompt_logprobs) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "p", "schema": {}},
                }
            },
            StructuredOutputsParams(json={}),
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            StructuredOutputsParams(json={"type": "object"}),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputsParams(choice=["a", "b"])),
        ({"guided_json": '{"type": "object"}'}, StructuredOutputsParams(json='{"type": "object"}')),
        ({"regex": "a+"}, StructuredOutputsParams(regex="a+")),
        ({"guided_grammar": "start: A"}, StructuredOutputsParams(grammar="start: A")),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "[ ]?"}},
            StructuredOutputsParams(json={}, whitespace_pattern="[ ]?"),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": ""},
            StructuredOutputsParams(json_object=True, whitespace_pattern=""),
        ),
    ],
)
def test_structure_has_several_dialects(fields, expected):
    assert chat(**fields).structured_outputs == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"stop": ["a", ""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "regex": "a"}, "regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_is_refused(fields, param):
    with pytest.raises(APIError) as info:
        completion(**fields)
    assert info.value.param == param
