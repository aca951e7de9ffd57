"""Requests: what is wrong is named, and the value is not repeated."""

import pytest
from pydantic import ValidationError

from jaxdist.server.errors import APIError, refused, wrong_field
from jaxdist.server.protocol import (
    ELSEWHERE,
    FIELDS,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)

OTHERS = list(ELSEWHERE.items())
CHAT = {"messages": [{"role": "user", "content": "a"}]}

IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
MISNAMED = {"type": "function", "function": {"name": "a b"}}


def refusal(kind, body) -> APIError:
    with pytest.raises(ValidationError) as info:
        kind.model_validate(body)
    return wrong_field(info.value, FIELDS)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "1"}, "temperature", "must be number"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": True}, "temperature", "must be number"),
        ({"max_tokens": 1.5}, "max_tokens", "must be integer"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"stop": [1]}, "stop.0", "must be string"),
        ({"stop": 1}, "stop", "must be string or list"),
        ({"stream": 1}, "stream", "must be boolean"),
        ({"logit_bias": {"secret": "x"}}, "logit_bias", "must be number"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "secret", "content": "a"}]}, "messages.0.role", "must be 'system'"),
        ({"messages": [{"role": "user"}]}, "messages.0", "content is missing"),
        ({"messages": [IMAGE]}, "messages.0.content.0.type", "'text'"),
        ({"tool_choice": "required"}, "tool_choice", "tools are missing"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        ({"stream_options": {}}, "stream_options", "only for stream=true"),
        ({"top_logprobs": 2}, "top_logprobs", "only for logprobs=true"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
        ({"tools": [MISNAMED]}, "tools.0.function.name", "match"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "only for stream=false"),
        ({"add_special_tokens": True}, "add_special_tokens", "must be False"),
        *((({name: "secret"}), name, f"is not supported; {fix}") for name, fix in OTHERS),
        *(
            ({"structured_outputs": {name: "secret"}}, "structured_outputs", f"{name} is not sup")
            for name in ("structural_tag", "disable_additional_properties")
        ),
    ],
)  # fmt: skip
def test_the_field_is_named(fields, param, message):
    error = refusal(ChatRequest, CHAT | fields)
    assert (error.param, error.status) == (param, 400)
    assert message in error.message
    assert "secret" not in error.message


def test_unknown_fields_and_nulls_are_ignored():
    nulls = dict.fromkeys(set(ChatRequest.model_fields) - {"messages"})
    nulls |= {"user": 5, "store": True, "use_beam_search": False, "functions": []}
    request = ChatRequest.model_validate(CHAT | nulls)
    assert request == ChatRequest.model_validate(CHAT)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_have_four_shapes(prompt):
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize("prompt", [None, 1, {}, [1.5], ["a", 1], [[1], "a"], [-1], [2**31]])
def test_other_prompts_are_refused(prompt):
    error = refusal(CompletionRequest, {"prompt": prompt})
    assert error.param is not None and error.param.startswith("prompt")


def test_a_text_or_a_chat_is_tokenized():
    assert "either" in refusal(TokenizeRequest, {}).message


def test_what_the_engine_refuses_names_its_field():
    assert refused("top_k=-3 must be at least -1").param == "top_k"
    assert refused("the prompt has no tokens").param is None


def test_the_error_object_is_openais():
    error = APIError("no", status=404, param="model", code="model_not_found").body()["error"]
    assert error == {
        "message": "no", "type": "not_found_error", "param": "model", "code": "model_not_found",
    }  # fmt: skip
