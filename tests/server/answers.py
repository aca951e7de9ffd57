"""Answers that hold calls of tools, and what is read out of them."""

from hypothesis import strategies as st

from jaxdist.server.dialects.hermes import Hermes
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


CUTS = st.lists(st.integers(0, 300), max_size=8)


def use(choice="auto", dialect=Hermes, **fields) -> ToolUse:
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL, OTHER]}
    request = ChatRequest.model_validate(chat | {"tool_choice": choice} | fields)
    return ToolUse(request, dialect)


def read(text, cuts=(), choice="auto", dialect=Hermes, **fields):
    """(content, [(name, arguments)]) of a text that comes in pieces."""
    parser, content, calls = ToolParser(use(choice, dialect, **fields)), "", {}
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
