"""What models are told of tools, and what they are held to."""

import json

import jsonschema
import llguidance
import pytest

from jaxdist.server.dialects.hermes import Hermes
from jaxdist.server.dialects.llama3_json import Llama3Json
from jaxdist.server.dialects.mistral import Mistral
from jaxdist.server.dialects.pythonic import Pythonic
from jaxdist.server.dialects.qwen3_coder import Qwen3Coder
from jaxdist.server.errors import APIError
from jaxdist.server.protocol import ChatRequest
from jaxdist.server.tools import ToolUse, describe_tools

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CODED = (
    "<tool_call>\n<function=weather>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"
)
TIME = {"type": "function", "function": {"name": "time"}}


def use(dialect=Hermes, **fields) -> ToolUse:
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [WEATHER, TIME]}
    return ToolUse(ChatRequest.model_validate(chat | fields), dialect)


def accepts(grammar: str, text: str) -> bool:
    """Whether llguidance takes the text, byte by byte, to its end."""
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(tokens)))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.get_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


class _Bytes:
    def __init__(self, tokens):
        self.tokens, self.special_token_ids = tokens, [256]
        self.eos_token_id, self.bos_token_id = 256, None

    def __call__(self, text):
        return list(text)


def test_the_kinds_of_choice():
    assert use().kind == use(tool_choice="auto").kind == "auto"
    none = use(tool_choice="none")
    assert (none.kind, none.told, none.structure()) == (None, [], None)
    assert use().structure() is None
    assert use(tool_choice="required").finish_reason == "tool_calls"


def test_a_named_tool_is_its_parameters():
    named = use(tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named.structure().json == CITY
    assert (named.name, named.finish_reason) == ("weather", "stop")
    bare = use(tool_choice={"type": "function", "function": {"name": "time"}}).structure()
    jsonschema.validate({}, bare.json)


@pytest.mark.parametrize(
    ("calls", "fine"),
    [
        ([{"name": "weather", "arguments": {"city": "Rome"}}], True),
        ([{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": ""}}], True),
        ([], False),
        ([{"name": "weather", "arguments": {}}], False),
        ([{"name": "other", "arguments": {}}], False),
    ],
)
def test_required_tools_are_an_array_of_calls(calls, fine):
    schema = use(tool_choice="required").structure().json
    assert jsonschema.Draft202012Validator(schema).is_valid(calls) is fine


def test_one_call_where_several_are_not_wanted():
    schema = use(tool_choice="required", parallel_tool_calls=False).structure().json
    assert schema["maxItems"] == 1


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("It is < 5 degrees.", True),
        ("", True),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', True),
        ('Yes.<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', False),
        ("<tool_call>", False),
    ],
)
def test_strict_tools_hold_calls_to_their_parameters(text, fine):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    grammar = use(tools=[strict, TIME]).structure().grammar
    assert accepts(llguidance.grammar_from("lark", grammar), text) is fine


@pytest.mark.parametrize(
    ("dialect", "call", "between", "end"),
    [
        (Llama3Json, '{{"name": "weather", "parameters": {}}}', "; ", ""),
        (Mistral, '{{"name": "weather", "arguments": {}}}', ", ", "]"),
    ],
)
def test_strict_tools_hold_calls_in_each_dialect(dialect, call, between, end):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    begin = "[TOOL_CALLS][" if end else ""
    good, bad = call.format('{"city": "Rome"}'), call.format('{"town": "Rome"}')
    for several, texts in (
        (True, [("Yes.", True), (begin + good + between + good + end, True)]),
        (False, [(begin + good + between + good + end, False), (begin + good + end, True)]),
        (True, [(begin + bad + end, False), (begin + good + between + bad + end, False)]),
    ):
        asked = use(dialect, tools=[strict, TIME], parallel_tool_calls=several)
        grammar = llguidance.grammar_from("lark", asked.structure().grammar)
        for text, fine in texts:
            assert accepts(grammar, text) is fine, text


TREE = {"type": "object", "properties": {"next": {"$ref": "#"}, "size": {"$ref": "#/$defs/size"}}}
NAMED = {"$ref": "#/definitions/tree", "definitions": {"tree": TREE | {"required": ["size"]}}}
NAMED["definitions"]["tree"]["properties"] = {
    "next": {"$ref": "#/definitions/tree"},
    "size": {"type": "integer"},
}


@pytest.mark.parametrize(
    "parameters",
    [
        TREE | {"required": ["size"], "$defs": {"size": {"type": "integer"}}},
        NAMED,
        NAMED | {"$schema": "http://json-schema.org/draft-07/schema#"},
        TREE
        | {"$id": "of-two", "required": ["size"], "$defs": {"size": {"type": "integer"}}}
        | {"$schema": "https://json-schema.org/draft/2020-12/schema"},
    ],
    ids=["$defs", "draft 4", "draft 7", "$id"],
)
def test_references_within_parameters_are_followed_where_calls_are_held_to_them(parameters):
    """Pydantic and zod write models in models so; the other tool's are of the same names."""
    other = {"type": "object", "$defs": {"size": {"type": "string"}}, "$id": "of-two"}
    other |= {"properties": {"size": {"$ref": "#/$defs/size"}}}
    functions = [
        {"name": "grow", "strict": True, "parameters": parameters},
        {"name": "other", "strict": True, "parameters": other},
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    required = json.dumps(use(tools=tools, tool_choice="required").structure().json)
    ways = [(llguidance.LLMatcher.grammar_from_json_schema(required), "[", "arguments", "]")]
    ways += [
        (llguidance.grammar_from("lark", use(dialect, tools=tools).structure().grammar), *around)
        for dialect, *around in (
            (Hermes, "<tool_call>\n", "arguments", "\n</tool_call>"),
            (Mistral, "[TOOL_CALLS][", "arguments", "]"),
            (Llama3Json, "", "parameters", ""),
        )
    ]
    for grammar, begin, key, end in ways:
        for arguments, fine in (
            ('{"size": 1}', True),
            ('{"next": {"size": 2}, "size": 1}', True),
            ('{"size": "1"}', False),
            ('{"next": {"size": "2"}, "size": 1}', False),
        ):
            text = f'{begin}{{"name": "grow", "{key}": {arguments}}}{end}'
            assert accepts(grammar, text) is fine, text


@pytest.mark.parametrize(
    ("dialect", "text", "fine"),
    [
        (Qwen3Coder, "Yes.", True),
        (Qwen3Coder, "Yes.\n" + CODED.format("city", "Rome"), True),
        (Qwen3Coder, CODED.format("city", "Ro\nme") + "\n" + CODED.format("city", ""), True),
        (Qwen3Coder, CODED.format("town", "Rome"), False),
        (Qwen3Coder, CODED.format("city", "Rome").replace("weather", "other"), False),
        (Qwen3Coder, "<tool_call>", False),
        (Qwen3Coder, "<tool_call>\n<function=time>\n</function>\n</tool_call>", True),
        (Pythonic, "Yes.", True),
        (Pythonic, '[weather(city="Rome"), time()]', True),
        (Pythonic, '[weather(city="Rome", days=3), time(a=1, b=[true])]', True),
        (Pythonic, '[weather(days=3, city="Rome")]', False),
        (Pythonic, "[weather(city=3)]", False),
        (Pythonic, "[weather()]", False),
        (Pythonic, "[other()]", False),
    ],
)
def test_strict_tools_hold_arguments_one_by_one(dialect, text, fine):
    properties = CITY["properties"] | {"days": {"type": "integer"}}
    function = {"name": "weather", "strict": True, "parameters": CITY | {"properties": properties}}
    asked = use(dialect, tools=[{"type": "function", "function": function}, TIME])
    grammar = llguidance.grammar_from("lark", asked.structure().grammar)
    assert accepts(grammar, text) is fine


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": ["a/b", "é"]}, ["a/b", "é"], ["a", ""]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"maxLength": 3}, ["", "éàü", "a\nb"], ["éàüö"]),
        ({"minLength": 2}, ["ab", "\n\n"], ["a", ""]),
        ({"minLength": 1, "maxLength": 2, "pattern": "b"}, ["b", "ab"], ["a", "aab"]),
        ({"pattern": "^[a/|^]+$"}, ["a/|^"], ["", "b", "xa"]),
        ({"pattern": "^a|b$|(c|d)"}, ["ax", "xb", "xcx", "d"], ["xa", "bx"]),
        ({"pattern": "^a\n[\\]/]$"}, ["a\n]", "a\n/"], ["a\n"]),
        ({"pattern": r"^\^\d/\$"}, ["^1/$", "^1/$x"], ["1/$", "x^1/$"]),
        ({"enum": ["ab", "b"], "pattern": "^a"}, ["ab"], ["b"]),
        ({"format": "date"}, ["Rome"], ["a</parameter>b"]),
    ],
)
def test_strict_texts_between_marks_are_held_to_their_schema(schema, good, bad):
    properties = {"city": {"type": "string"} | schema}
    function = {"name": "weather", "strict": True, "parameters": CITY | {"properties": properties}}
    asked = use(Qwen3Coder, tools=[{"type": "function", "function": function}])
    grammar = llguidance.grammar_from("lark", asked.structure().grammar)
    for text in good + bad:
        assert accepts(grammar, CODED.format("city", text)) is (text in good), text
        if "</" not in text:
            found = not [*jsonschema.Draft202012Validator(properties["city"]).iter_errors(text)]
            assert found is (text in good), text


@pytest.mark.parametrize(
    "schema", [{"minLength": -1}, {"maxLength": "3"}, {"maxLength": True}, {"pattern": 5}]
)
def test_strict_texts_of_no_schema_are_refused(schema):
    properties = {"city": {"type": "string"} | schema}
    function = {"name": "weather", "strict": True, "parameters": CITY | {"properties": properties}}
    with pytest.raises(APIError, match=f"{[*schema][0]} of a text must be"):
        use(Qwen3Coder, tools=[{"type": "function", "function": function}]).structure()


@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": []},
        {"properties": []},
        {"required": "city"},
        {"properties": {"city": {"type": "string", "enum": 5}}},
    ],
)
def test_strict_tools_that_no_grammar_can_hold_are_refused(parameters):
    function = {"name": "weather", "strict": True, "parameters": parameters}
    for dialect in (Qwen3Coder, Pythonic):
        with pytest.raises(APIError, match="the parameters of weather|parameters, here those of"):
            use(dialect, tools=[{"type": "function", "function": function}]).structure()


def test_calls_that_stay_text_are_held_to_nothing():
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    asked = use(None, tools=[strict])
    assert (asked.structure(), asked.marks) == (None, ())
    assert use(Mistral, tool_choice="none").marks == ()
    assert "[TOOL_CALLS]" in use(Mistral).marks


def test_models_whose_templates_know_no_tools_are_told_in_words():
    call = {"function": {"name": "time", "arguments": {}}}
    messages = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
    ]
    told = describe_tools(messages, [TIME])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert json.dumps(TIME) in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    assert told[3]["content"] == "<tool_response>\nnoon\n</tool_response>"
    first = describe_tools([{"role": "system", "content": "Be brief."}], [TIME])[0]["content"]
    assert first.startswith("Be brief.\n\n# Tools")
