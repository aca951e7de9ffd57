"""Thoughts are told apart, whatever the pieces, and nothing of a text is lost."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.config import UsageError
from jaxdist.data.tokenizer import JsonTokenizer
from jaxdist.inference.guidance.thoughts import Opening
from jaxdist.server.options import Options
from jaxdist.server.reasoning import ReasoningParser, opening
from jaxdist.server.service import ServerOptions
from jaxdist.server.special_tokens import SpecialTokens
from tests.server.answers import CUTS
from tests.server.conftest import CHATML

CHATS = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "<think>"}], "max_tokens": 120}
TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
PARTS = ["<think>", "</think>", "<thi", "</th", "nk>", "<", " ", "\n", "ab"]


def split(text, begins, cuts=()):
    """(thoughts, answer) of a text that comes in pieces."""
    parser = ReasoningParser(begins)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [parser.push(text[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    thoughts, answers = zip(*pieces, parser.finish(), strict=True)
    return "".join(thoughts), "".join(answers)


@given(text=st.lists(st.sampled_from(PARTS), max_size=8).map("".join), cuts=CUTS)
@pytest.mark.parametrize("begins", Opening)
def test_any_text_is_split_the_same_in_pieces(text, begins, cuts):
    opened = text.lstrip().removeprefix("<think>")
    if begins is Opening.AFTER:
        expected = ("", text)
    elif text.lstrip().startswith("<think>"):
        expected = opened.partition("</think>")[::2]
    else:
        inside = begins is Opening.INSIDE
        expected = text.partition("</think>")[::2] if inside else ("", text)
    assert split(text, begins) == split(text, begins, cuts) == expected
    assert split(text, begins, range(len(text))) == expected


@pytest.mark.parametrize(
    ("end", "r1", "qwen3"),
    [
        ("<|assistant|>", Opening.INSIDE, Opening.BEFORE),
        ("<|assistant|><think>\n", Opening.INSIDE, Opening.INSIDE),
        ("<|assistant|><think>\n\n</think>\n\n", Opening.AFTER, Opening.AFTER),
    ],
)
def test_the_prompt_may_open_the_thoughts(end, r1, qwen3):
    assert opening("deepseek_r1", end) is r1
    assert opening("qwen3", end) is qwen3


@pytest.fixture(scope="module")
def made(serve, inner):
    """made(parser, template, script): a server whose marks are special tokens, and its tokenizer.

    The fake model writes the script, then letters and, now and then, the end of thoughts.
    """

    def make(parser, template=CHATML, script=""):
        own = inner()
        own.add_special_tokens(["<think>", "</think>"])
        eos_id = own.token_to_id("<|im_end|>")
        tokenizer = JsonTokenizer(own, name="t", eos_id=eos_id, bos_id=None, fingerprint="t")
        words = [own.token_to_id("</think>"), *(tokenizer.encode(a)[0] for a in "abcdefgh")]
        options = ServerOptions(names=("t",), reasoning_parser=parser)
        room = {"words": words, "max_model_len": 1024, "num_blocks": 300}
        room["script"] = SpecialTokens(tokenizer).encode_raw(script)
        return serve(options, tokenizer=tokenizer, template=template, **room), tokenizer

    return make


def whole_and_streamed(server, body):
    """The choice, and its deltas."""
    (choice,) = server.post(CHATS, body).json()["choices"]
    events = [json.loads(event)["choices"][0] for event in server.events(CHATS, body)[:-1]]
    return choice, [event["delta"] for event in events]


def joined(deltas, key):
    return "".join(delta.get(key) or "" for delta in deltas)


def test_an_answer_that_begins_in_thoughts(made):
    opening = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
    for parser, template in (("deepseek_r1", CHATML), ("qwen3", opening)):
        server, tokenizer = made(parser, template)
        body = CHAT | {"return_token_ids": True, "seed": 4}  # its thoughts are not empty
        choice, deltas = whole_and_streamed(server, body)
        text = tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
        thoughts, mark, answer = text.partition("</think>")
        assert mark and thoughts and answer
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == (thoughts, answer)
        assert message["reasoning"] == joined(deltas, "reasoning") == thoughts
        assert joined(deltas, "reasoning_content") == thoughts
        assert joined(deltas, "content") == answer


def test_thoughts_calls_and_usage(made):
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    text = f"<think>\nIs it <tool_call>?\n</think>\n\n{call}"
    server, tokenizer = made("qwen3", script=f"{text}<|im_end|>")
    body = CHAT | {"tools": [TOOL]}
    choice, deltas = whole_and_streamed(server, body)
    message = choice["message"]
    assert message["reasoning"] == joined(deltas, "reasoning") == "\nIs it <tool_call>?\n"
    assert message["content"] is None and not joined(deltas, "content")
    assert message["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}
    assert any("tool_calls" in delta for delta in deltas)
    assert choice["finish_reason"] == "tool_calls"
    usage = server.post(CHATS, body).json()["usage"]
    assert usage["completion_tokens"] == len(SpecialTokens(tokenizer).encode_raw(text)) + 1


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
STRICT = {"type": "function", "function": TOOL["function"] | {"strict": True}}
CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
# What is asked for: what a model that thinks first writes, and what it would rather write.
STRUCTURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "response_format": ({"response_format": FORMAT}, '{"a":1}', "one"),
    "json_object": ({"response_format": {"type": "json_object"}}, "{}", "one"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "one"),
    "regex": ({"guided_regex": "[0-9]{3}"}, "123", "one"),
    "strict": ({"tools": [STRICT]}, CALL, "<tool_call>[]"),
    "required": (
        {"tools": [TOOL], "tool_choice": "required"},
        '[{"name": "time", "arguments": {}}]',
        "one",
    ),
    "named": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "time"}}},
        "{}",
        "one",
    ),
}


@pytest.fixture(scope="module", params=["deepseek_r1", "qwen3", "opened"])
def thoughtful(request, made):
    """thoughtful(answer): a server whose model thinks before it would write `answer`."""
    servers: dict[str, Any] = {}

    def make(answer):
        if answer not in servers:
            template = CHATML
            if request.param == "opened":
                template = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
            begin = "<think>" if request.param == "qwen3" else ""
            script = f"{begin}So <tool_call> or {{?</think>{answer}<|im_end|>"
            servers[answer] = made(request.param.replace("opened", "qwen3"), template, script)[0]
        return servers[answer]

    return make


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_structure_binds_what_follows_the_thoughts(kind, thoughtful):
    pytest.importorskip("llguidance")
    fields, answer, rather = STRUCTURES[kind]
    for written in (answer, rather):
        choice, deltas = whole_and_streamed(thoughtful(written), CHAT | fields | {"seed": 1})
        message = choice["message"]
        assert message["reasoning"] == joined(deltas, "reasoning") == "So <tool_call> or {?"
        if "tools" in fields and written == answer:
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "time", "arguments": "{}"}
            assert not message["content"] and not joined(deltas, "content")
        elif "tools" not in fields:
            content = message["content"]
            assert content == joined(deltas, "content")
            assert content == answer if written == answer else content != rather
            if "response_format" in fields and choice["finish_reason"] == "stop":
                assert isinstance(json.loads(content), dict)


def test_an_answer_need_not_think_and_a_closed_pair_says_that_it_does_not(made):
    pytest.importorskip("llguidance")
    closed = CHATML.replace("assistant\n'", "assistant\n<think>\n\n</think>\n\n'")
    body = CHAT | {"structured_outputs": {"choice": ['{"a": 1}']}}
    for parser, template, script in (
        ("qwen3", CHATML, ""),
        ("qwen3", closed, "<think>"),
        ("deepseek_r1", closed, "<think>"),
    ):
        server, _ = made(parser, template, script or '{"a": 1}')
        choice, deltas = whole_and_streamed(server, body)
        assert choice["message"]["content"] == joined(deltas, "content") == '{"a": 1}'
        assert "reasoning" not in choice["message"]


def test_thoughts_that_are_cut_are_no_answer(made):
    pytest.importorskip("llguidance")
    server, _ = made("deepseek_r1", script="thinking and thinking")
    body = CHAT | {"response_format": FORMAT, "max_tokens": 8}
    choice, deltas = whole_and_streamed(server, body)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["reasoning"] == joined(deltas, "reasoning") == "thinking"


def test_a_continued_answer_is_where_its_text_is(made):
    server, _ = made("deepseek_r1")
    template_shows = [*CHAT["messages"], {"role": "assistant", "content": "So <think>I"}]
    body = CHAT | {"messages": template_shows, "continue_final_message": True, "seed": 1}
    assert server.post(CHATS, body).json()["choices"][0]["message"]["reasoning"]
    body["messages"] = [*CHAT["messages"], {"role": "assistant", "content": "So"}]
    assert "reasoning" not in server.post(CHATS, body).json()["choices"][0]["message"]


def test_the_parsers_are_options():
    given = Options(model="m", reasoning_parser="qwen3", tool_call_parser="mistral").server()
    assert (given.reasoning_parser, given.tool_call_parser) == ("qwen3", "mistral")
    refused: list[dict[str, Any]] = [{"reasoning_parser": "qwen"}, {"tool_call_parser": "llama"}]
    for wrong in refused:
        with pytest.raises(UsageError, match="parser='.*' is not one of "):
            Options(model="m", **wrong)
