"""Each dialect: calls are read whatever the pieces, and what is none stays text to the letter."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.server.dialects.choice import DIALECTS, by_template, chosen
from jaxdist.server.dialects.hermes import Hermes
from jaxdist.server.dialects.keywords import Keywords
from jaxdist.server.dialects.llama3_json import Llama3Json
from jaxdist.server.dialects.mistral import Mistral
from jaxdist.server.dialects.pythonic import Pythonic
from jaxdist.server.dialects.qwen3_coder import Qwen3Coder
from tests.server.answers import ARGUMENTS, CALLS, CUTS, TEXTS, VALUES, read

# Pieces that answers are made of, whole and broken.
PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("<tool_", "<|py", "[TOOL_", "time", "weather", " ", "\n", ";", ",", "[", "]", "{", "}"),
        *('"', ":", "\\", '{"name": "time", ', '"arguments": {', '"parameters": {', '"a": 1}'),
        *('{"name": "time", "parameters": {}}', '{"name": "f", "arguments": {"b": [2]}}'),
        *(
            "<function=",
            "</function>",
            "<parameter=a>",
            "</parameter>",
            "=time>",
            "[time(",
            "a=1)]",
        ),
    ]
)
ANSWERS = st.lists(PARTS, max_size=12).map("".join)


def found(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


def written(calls, key, indent=None):
    return [json.dumps({"name": name, key: given}, indent=indent) for name, given in calls]


@pytest.mark.parametrize("dialect", dict.fromkeys(DIALECTS.values()))
@given(text=ANSWERS, cuts=CUTS)
def test_any_answer_reads_the_same_in_pieces(dialect, text, cuts):
    whole = content, calls = read(text, dialect=dialect)
    assert read(text, cuts, dialect=dialect) == whole
    assert read(text, range(len(text)), dialect=dialect) == whole
    assert calls or content == text
    if dialect in (Pythonic, Qwen3Coder):  # which do not write JSON
        return
    # Nothing is told twice, nor what the model did not write.
    assert len(content) + sum(len(name) + len(given) for name, given in calls) <= len(text)


@given(
    calls=st.lists(CALLS, min_size=1, max_size=3),
    key=st.sampled_from(["parameters", "arguments"]),
    lead=st.sampled_from(["", "\n", "<|python_tag|>", "Yes.\n<|python_tag|> "]),
    separator=st.sampled_from([";", "; ", "\n", "\n<|python_tag|>"]),
    indent=st.sampled_from([None, 1]),
    cuts=CUTS,
)
def test_llama_writes_objects(calls, key, lead, separator, indent, cuts):
    text = lead + separator.join(written(calls, key, indent))
    content, told = read(text, cuts, dialect=Llama3Json)
    assert (content, found(told)) == ("Yes." if "Yes" in lead else "", calls)


@given(
    calls=st.lists(CALLS, min_size=1, max_size=3),
    lead=st.sampled_from(["", "Yes. "]),
    style=st.sampled_from(["array", "indented", "[ARGS]", "[CALL_ID]a1b2c3d4e[ARGS]", "", " "]),
    cuts=CUTS,
)
def test_mistral_writes_an_array_or_names(calls, lead, style, cuts):
    if style in ("array", "indented"):
        indent = 1 if style == "indented" else None
        text = f"[TOOL_CALLS] [{', '.join(written(calls, 'arguments', indent))}]"
    else:
        text = "".join(f"[TOOL_CALLS]{name}{style}{json.dumps(given)}" for name, given in calls)
    content, told = read(lead + text, cuts, dialect=Mistral)
    assert (content, found(told)) == (lead.strip(), calls)


CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "zone": {"enum": ["a", "b"]},
        "days": {"type": "integer"},
        "near": {"type": ["null", "string"]},
        "more": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        "other": {"type": "object"},
        "wet": {"type": "boolean"},
    },
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
SPELLED = st.text('{}[]"\\,:</>=ab \n', max_size=8)
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "city": SPELLED,
        "days": st.integers(),
        "near": st.none() | SPELLED.filter(lambda text: text.lower() != "null"),
        "more": st.none() | st.lists(VALUES, max_size=3),
        "other": st.dictionaries(TEXTS, VALUES, max_size=3),
        "wet": st.booleans(),
        "unknown": SPELLED,
    },
)


def of_qwen(arguments, outer=True):
    """A call as Qwen3-Coder's template writes it."""
    bare = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in bare.items()]
    call = f"<function=weather>\n{''.join(lines)}</function>"
    return f"<tool_call>\n{call}\n</tool_call>" if outer else call


@given(
    calls=st.lists(GIVEN, min_size=1, max_size=3),
    lead=st.sampled_from(["", "Yes.\n", "a < b\n\n"]),
    outer=st.booleans(),
    cuts=CUTS,
)
def test_qwen3_coder_writes_arguments_one_by_one(calls, lead, outer, cuts):
    text = lead + "\n".join(of_qwen(arguments, outer) for arguments in calls)
    content, told = read(text, cuts, dialect=Qwen3Coder, tools=[WEATHER])
    assert content == lead.rstrip()
    assert found(told) == [("weather", arguments) for arguments in calls]


@given(
    calls=st.lists(st.tuples(st.just("weather"), ARGUMENTS), min_size=1, max_size=3),
    lead=st.sampled_from(["", "\n"]),
    spell=st.sampled_from([repr, json.dumps]),
    cuts=CUTS,
)
def test_calls_in_pythons_notation(calls, lead, spell, cuts):
    written = [
        f"{name}({', '.join(f'{key}={spell(value)}' for key, value in given.items())})"
        for name, given in calls
    ]
    content, told = read(f"{lead}[{', '.join(written)}]", cuts, dialect=Pythonic)
    assert (content, found(told)) == ("", calls)


@given(st.text("a1xu=,'\"\\[](){}: T\n", max_size=14))
def test_whatever_stands_in_a_call_is_an_object(text):
    keywords, out = Keywords(), ""
    for char in text + "'\")]})]})]})]})]})]})]})":
        out += keywords.push(char)
        if keywords.done:
            break
    if keywords.done:
        assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("5", "integer", 5),
        ("five", "integer", "five"),
        ("True", "boolean", True),
        ("None", "object", None),
        ("[1, NaN]", "array", [1, "NaN"]),
        ("{'a': (1, None)}", "object", {"a": [1, None]}),
        ("[1)] )", "array", "[1)] )"),
        ("1e400", "number", float("inf")),
        ("5", "string", "5"),
        ("null", ["string", "null"], None),
        ("null", "string", "null"),
        ("[" * 3000, "array", "[" * 3000),
        ("5", {"no": "type"}, "5"),
    ],
)
def test_a_value_is_what_its_schema_says(value, kind, expected):
    schema = {"properties": {"x": {"type": kind}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = f"<function=f><parameter=x>{value}</parameter></function>"
    ((_, arguments),) = read(text, dialect=Qwen3Coder, tools=[tool])[1]
    assert json.loads(arguments) == {"x": expected}


@pytest.mark.parametrize(
    ("dialect", "text", "content", "names"),
    [
        (Llama3Json, '{"city": "Rome"}', '{"city": "Rome"}', []),
        (Llama3Json, '{"name": "time"}', '{"name": "time"}', []),
        (Llama3Json, 'So: {"name": "time", "parameters": {}}', None, []),
        (Llama3Json, '{"name": "time", "parameters": "now"}', None, []),
        (Llama3Json, '<|python_tag|>search.call(query="x")', None, []),
        (Llama3Json, '{"name": "time", "parameters": {}}; {"x": 1}', '; {"x": 1}', ["time"]),
        (Llama3Json, '{"name": "time", "parameters": {}}\nDone.', "\nDone.", ["time"]),
        (Llama3Json, '{"name": "time", "parameters": {}} ;\n', "", ["time"]),
        (Llama3Json, '{"parameters": {}, "name": "time"}', "", ["time"]),
        (Mistral, "[TOOL_CALLS] nothing, really", None, []),
        (Mistral, "[TOOL_CALLS] []", None, []),
        (Mistral, '[TOOL_CALLS] [{"name": "time"}]', None, []),
        (Mistral, "see [TOOL_CALLS] and so on {}", None, []),
        (Mistral, "[TOOL_CALLS][TOOL_CALLS]time[ARGS]{}", "[TOOL_CALLS]", ["time"]),
        (Mistral, '[TOOL_CALLS] [{"name": "time", "arguments": {}}, 5]', ", 5]", ["time"]),
        (Mistral, '[TOOL_CALLS] [{"name": "time", "arguments": {}},', "", ["time"]),
        (Mistral, "[TOOL_CALLS]time[ARGS]{} Done.", " Done.", ["time"]),
        (Qwen3Coder, "<tool_call>\nnothing", None, []),
        (Qwen3Coder, "<tool_call>\n<function=a b>", None, []),
        (Qwen3Coder, "if a <function", None, []),
        (Qwen3Coder, "<tool_call><tool_call><function=time></function>", "<tool_call>", ["time"]),
        (Qwen3Coder, "<tool_call><function=time></tool_call>Done.", "Done.", ["time"]),
        (Qwen3Coder, "<function=time>junk</function></tool_call>\n", "", ["time"]),
        (Pythonic, "[see (this)]", None, []),
        (Pythonic, "[other(a=1)]", None, []),
        (Pythonic, "[time](there)", None, []),
        (Pythonic, "[time(1)]", None, []),
        (Pythonic, "So: [time()]", None, []),
        (Pythonic, "[time(), 5]", ", 5]", ["time"]),
        (Pythonic, "[time()] Done.", " Done.", ["time"]),
        (Pythonic, "[time( ) , weather (a = 1) ]\n", "", ["time", "weather"]),
    ],
)
def test_what_is_no_sound_call_stays_text(dialect, text, content, names):
    told, calls = read(text, dialect=dialect)
    assert (told, [name for name, _ in calls]) == (text if content is None else content, names)


def test_a_json_answer_does_not_wait_for_its_end():
    """That it is no call is known with its first key."""
    told, _ = read('{"city": "Ro', dialect=Llama3Json)
    assert told == '{"city": "Ro'


def test_arguments_are_told_as_they_come():
    for dialect, text in (
        (Llama3Json, '{"name": "time", "parameters": {"zone": "Eu'),
        (Mistral, '[TOOL_CALLS] [{"name": "time", "arguments": {"zone": "Eu'),
        (Mistral, '[TOOL_CALLS]time[ARGS]{"zone": "Eu'),
        (Qwen3Coder, "<function=time><parameter=zone>\nEu"),
        (Pythonic, "[time(zone='Eu"),
    ):
        assert read(text, (30, 35), dialect=dialect) == ("", [("time", '{"zone": "Eu')])


LLAMA = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of \
argument name and its value}.' }}"""


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{{ tools }}<tool_call>\n", Hermes),
        ("{{ tools }}", Hermes),
        ("{{ tools }}{{ '[TOOL_CALLS] [' }}", Mistral),
        (LLAMA, Llama3Json),
        ("{{ tools }}<|python_tag|>", Llama3Json),
        ("{{ tools }}<tool_call>\n<function=example>", Qwen3Coder),
        ("{{ tools }}[func_name1(a=b)]<|python_tag|>", Pythonic),
    ],
)
def test_the_template_tells_the_dialect(template, dialect):
    assert chosen("auto", template) is by_template(template) is dialect
    assert chosen("mistral", template) is Mistral
    assert chosen("none", template) is chosen("none", None) is None
    assert chosen("llama3_json", None) is Hermes  # which is what its model is told of
