"""Calls in a growing text: what is given does not depend on how it was split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.server.dialects.hermes import Hermes
from jaxdist.server.dialects.mistral import Mistral
from jaxdist.server.tool_calls import ToolParser
from tests.server.answers import CALLS, CUTS, read, use

NAMED = {"type": "function", "function": {"name": "weather"}}


def hermes(name, arguments, swapped=False, indent=None):
    call = {"name": name, "arguments": arguments}
    if swapped:
        call = dict(reversed(call.items()))
    return f"<tool_call>\n{json.dumps(call, indent=indent)}\n</tool_call>"


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
        "so \n<tool_call>\n{ no",
    ],
)
def test_what_is_no_call_stays_content(text):
    assert read(text) == (text, [])


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
    assert read('{"city": "Rome"}', (3, 7), NAMED) == ("", [("weather", '{"city": "Rome"}')])


def test_without_tools_all_is_content():
    text = hermes("weather", {})
    assert read(text, choice="none") == (text, [])
    assert read(text, dialect=None) == (text, [])


def test_ids_are_as_the_dialect_has_them():
    for dialect, length in ((Hermes, 29), (Mistral, 9)):
        for choice, text in (("required", '[{"name": "time", "arguments": {}}]'), (NAMED, "{}")):
            (call,) = ToolParser(use(choice, dialect)).push(text).calls
            assert len(call.id) == length
