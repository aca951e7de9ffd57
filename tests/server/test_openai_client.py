"""The official client is served unmodified."""

import json

import openai
import pytest

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client):
    assert [model.id for model in client.models.list()] == ["small", "alias"]
    assert client.models.retrieve("small").id == "small"


def test_chat_whole_and_streamed(client):
    fixed = {"model": "small", "messages": MESSAGES, "max_tokens": 16, "seed": 3}
    whole = client.chat.completions.create(**fixed)
    stream = client.chat.completions.create(
        **fixed, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_completions_and_embeddings(client):
    answer = client.completions.create(model="small", prompt=["a", "b"], max_tokens=3, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    data = client.embeddings.create(model="small", input="a").data  # asks for base64
    assert len(data[0].embedding) == 8 and sum(x * x for x in data[0].embedding) == pytest.approx(1)


def test_vllms_fields_as_extra_body(client):
    answer = client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=4,
        extra_body={"top_k": 3, "min_tokens": 4, "structured_outputs": {"choice": ["aaaa", "bb"]}},
    )
    assert answer.choices[0].message.content in ("aaaa", "bb")


def test_a_schema_is_kept(client):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22, 333]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=300,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 22, 333)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_tools_that_must_be_called(client, choice, stream):
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=400,
        tools=[tool],
        tool_choice=choice,
        parallel_tool_calls=False,
        stream=stream,
    )
    if stream:
        chunks = list(answer)
        calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        name, arguments = calls[0].function.name, "".join(c.function.arguments for c in calls)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        reason = answer.choices[0].finish_reason
    assert name == "f" and json.loads(arguments)["city"] in ("Rome", "Paris")
    assert reason == ("tool_calls" if choice == "required" else "stop")


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as info:
        client.chat.completions.create(model="small", messages=MESSAGES, temperature=9)
    assert info.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as info:
        client.chat.completions.create(model="none", messages=MESSAGES)
    assert info.value.code == "model_not_found"
