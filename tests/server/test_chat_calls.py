"""Calls in the dialect of a model's template, over the server; the marks are special tokens."""

import json

import pytest

from jaxdist.data.tokenizer import JsonTokenizer
from jaxdist.server.service import ServerOptions
from tests.server.conftest import CHATML

CHATS = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "when?"}], "max_tokens": 60}
MARKS = {"mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}
CALLS = {
    "mistral": 'time[ARGS]{"zone": 1}',
    "llama3_json": '{"name": "time", "parameters": {"zone": 1}}',
}


@pytest.fixture(scope="module", params=MARKS)
def told(request, serve, inner):
    """A server whose template shows a mark, and a body whose answer is a call."""
    made, mark = inner(), MARKS[request.param]
    made.add_special_tokens([mark])
    eos_id = made.token_to_id("<|im_end|>")
    tokenizer = JsonTokenizer(made, name="m", eos_id=eos_id, bos_id=None, fingerprint=mark)
    template = "{% if tools %}" + mark + "{% endif %}" + CHATML
    options = ServerOptions(names=("m",))
    grammar = f"start: <[{made.token_to_id(mark)}]> {json.dumps(CALLS[request.param])}"
    server = serve(options, tokenizer=tokenizer, template=template, max_model_len=512)
    return server, CHAT | {"structured_outputs": {"grammar": grammar}}


def test_a_call_is_read_whose_mark_is_a_special_token(told):
    server, body = told
    asked = body | {"tools": [TOOL]}
    (choice,) = server.post(CHATS, asked).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert call["function"] == {"name": "time", "arguments": '{"zone": 1}'}
    deltas = [json.loads(e)["choices"][0]["delta"] for e in server.events(CHATS, asked)[:-1]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["name"] for call in calls if "name" in call] == ["time"]
    assert "".join(call["arguments"] for call in calls) == '{"zone": 1}'
    assert not any(delta.get("content") for delta in deltas)


def test_without_tools_the_mark_is_no_text(told):
    server, body = told
    (choice,) = server.post(CHATS, body).json()["choices"]
    assert choice["message"]["content"] in CALLS.values()
    assert choice["finish_reason"] == "stop"
