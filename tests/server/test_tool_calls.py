"""Calls in a growing text: what is given does not depend on how it was split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.server.protocol import ChatRequest
from jaxdist.server.tool_calls import ToolParser
from jaxdist.server.tools import ToolUse

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "time"}}
TEXTS = st.text('{}[]"\\,:<>/ab \n', max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "name", "arguments"]), VALUES, max_size=3)
CALLS = st.tuples(st.sampled_from(["weather", "time"]), ARGUMENTS)


def use(choice="auto", **fields) -> ToolUse:
    return ToolUse(
        ChatRequest.model_validate(
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [TOOL, OTHER],
                "tool_choice": choice,
            }
            | fields
        )
    )


def read(text, cuts=(), choice="auto"):
    """(content, [(name, arguments)]) of a text that comes in pieces."""
    parser, content, calls = ToolParser(use(choice)), "", {}
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    for delta in [*map(parser.push, pieces), parser.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.id is not None:
                assert call.index == len(calls)
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
    return content, [tuple(call) for call in calls.values()]


def hermes(name, arguments, swapped=False, indent=None):
    call = {"name": name, "arguments": arguments}
    if swapped:
        call = dict(reversed(call.items()))
    return f"<tool_call>\n{json.dumps(call, indent=indent)}\n</tool_call>"


CUTS = st.lists(st.integers(0, 300), max_size=8)


@given(
    text=st.text("<tol_ca> \nx", max_size=12),
    calls=st.lists(CALLS, max_size=3),
    swapped=st.booleans(),
    indent=st.sampled_from([None, 1]),
    cuts=CUTS,
)
def test_calls_are_read_whatever_the_pieces(text, calls, swapped, indent, cuts):
    written = text + "\n".join(hermes(*call, swapped, indent) for call in calls)
    content, found = read(written, cuts)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    expected = text if text.strip() or not calls else ""
    assert content.rstrip() == expected.rstrip() if calls else content == expected


@given(text=st.text('<tol_ca>/ \n{}[]":,xname', max_size=60), cuts=CUTS)
def test_any_text_reads_the_same_in_pieces(text, cuts):
    for choice in ("auto", "required"):
        assert read(text, cuts, choice) == read(text, (), choice)


@pytest.mark.parametrize(
    "text",
    [
        "just text",
        "a < b and <tool",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[1, 2]</tool_call>",
        "<tool_call>nothing",
    ],
)
def test_what_is_no_call_stays_content(text):
    content, calls = read(text)
    assert not calls
    assert content.removesuffix("</tool_call>") == text.removesuffix("</tool_call>")


def test_a_call_that_is_cut_gives_what_there_was():
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa'
    assert read(text) == ("", [("weather", '{"city": "Pa')])


def test_the_end_mark_may_be_missing():
    one = hermes("weather", {"a": 1}).removesuffix("</tool_call>")
    assert read(one + hermes("time", {}))[1] == [("weather", '{"a": 1}'), ("time", "{}")]


@given(calls=st.lists(CALLS, min_size=1, max_size=3), cuts=CUTS)
def test_required_calls_are_an_array(calls, cuts):
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    content, found = read(text, cuts, "required")
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_a_named_call_is_its_arguments():
    named = {"type": "function", "function": {"name": "weather"}}
    assert read('{"city": "Rome"}', (3, 7), named) == ("", [("weather", '{"city": "Rome"}')])


def test_without_tools_all_is_content():
    text = hermes("weather", {})
    assert read(text, choice="none") == (text, [])
