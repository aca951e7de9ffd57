"""Thoughts and a structure after them, written by a model with random weights: with guesses and
without them the same text and usage, and what follows the thoughts conforms."""

import json
import re

import jax
import jsonschema
import pytest

from jaxdist.config import MeshShape
from jaxdist.data.tokenizer import JsonTokenizer
from jaxdist.inference.async_engine import AsyncEngine
from jaxdist.inference.device.model_runner import ModelRunner
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.guidance.thoughts import BEGIN, END
from jaxdist.server.chat import Chat
from jaxdist.server.service import Model, ServerOptions
from jaxdist.server.token_text import TokenText
from tests.inference.conftest import model_of  # noqa: F401 - a fixture
from tests.server.conftest import CHATML

pytest.importorskip("llguidance")
CHATS = "/v1/chat/completions"
GUESSES = {"without": 0, "with": 4}
PARSERS = ("qwen3", "deepseek_r1")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "list": {"type": "array", "items": {"enum": [1, "two", None]}, "maxItems": 3},
    },
    "required": ["name", "list"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CALLED = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
WISHES = {
    "schema": {"response_format": FORMAT},
    "regex": {"structured_outputs": {"regex": "(ab|c){4,8}"}},
    "call": {"tools": [CALLED], "tool_choice": "required", "parallel_tool_calls": False},
}
QUESTIONS = [f"{word} {word} {word}" for word in ("ab", "<think>", "{}", "12")]


@pytest.fixture(scope="module")
def tokenizer(inner) -> JsonTokenizer:
    made = inner()
    made.add_special_tokens([BEGIN, END])
    eos_id = made.token_to_id("<|im_end|>")
    return JsonTokenizer(made, name="r", eos_id=eos_id, bos_id=None, fingerprint="r")


@pytest.fixture(scope="module")
def servers(serve, model_of, tokenizer):  # noqa: F811
    """By (guesses, parser); an engine for each number of guesses, which all parsers share."""
    size = tokenizer.vocab_size
    model = model_of(vocab_size=size, max_position_embeddings=1024)

    def engine_of(count: int) -> AsyncEngine:
        runner = ModelRunner(
            model.config,
            lambda like: jax.tree.map(lambda x, at: jax.device_put(x, at.sharding), model, like),
            mesh=MeshShape.parse("1x1x1"),
            options=RunnerOptions(
                num_blocks=80, max_num_seqs=1, max_row_tokens=32, max_drafts=4, dtype="float32"
            ),
        )
        options = EngineOptions(num_speculative_tokens=count, prompt_lookup_min=1)
        return AsyncEngine(Engine(runner, tokenizer, options))

    def served(engine: AsyncEngine) -> Model:
        chat = Chat(tokenizer, {}, template=CHATML)
        return Model(engine=engine, tokenizer=tokenizer, chat=chat, text_of=TokenText(tokenizer))

    engines = {guesses: engine_of(count) for guesses, count in GUESSES.items()}
    return {
        (guesses, parser): serve(
            ServerOptions(names=("r",), reasoning_parser=parser), model=served(engine)
        )
        for guesses, engine in engines.items()
        for parser in PARSERS
    }


def asked(tokenizer, wish, number):
    """Greedy; a model that was never taught to would hardly begin and end thoughts by itself, and
    might fill an object with spaces for ever. How early thoughts end depends on the question."""
    ids = {mark: str(tokenizer._inner.token_to_id(mark)) for mark in (BEGIN, END)}
    fixed = {"temperature": 0, "max_tokens": 300, "frequency_penalty": 0.7}
    bias = {ids[BEGIN]: 12, ids[END]: 6 + 2 * number} | {
        str(i): -100 for i in tokenizer.encode(" \t\r\n")
    }
    chat = {"messages": [{"role": "user", "content": QUESTIONS[number]}], "logit_bias": bias}
    return chat | fixed | WISHES[wish]


def answered(server, body):
    """(text, thoughts, answer, end, usage), the same in a stream."""
    answer = server.post(CHATS, body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    (choice,) = whole["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or [{"function": {"arguments": ""}}]
    told = {
        "reasoning": message.get("reasoning") or "",
        "content": message["content"] or "",
        "arguments": calls[0]["function"]["arguments"],
    }
    parts = dict.fromkeys(told, "")
    events = server.events(CHATS, body | {"stream_options": {"include_usage": True}})
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["usage"] == whole["usage"]
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks[:-1]):
        for call in delta.get("tool_calls") or ():
            parts["arguments"] += call["function"]["arguments"]
        for key in ("reasoning", "content"):
            parts[key] += delta.get(key) or ""
    assert parts == told
    return told, choice["finish_reason"], whole["usage"]["completion_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("wish", WISHES)
def test_what_follows_thoughts_conforms_and_guesses_change_nothing(
    servers, tokenizer, wish, parser
):
    thoughts = set()
    for number in range(len(QUESTIONS)):
        body = asked(tokenizer, wish, number)
        told, reason, count = answered(servers["without", parser], body)
        assert (told, reason, count) == answered(servers["with", parser], body)
        thoughts.add(told["reasoning"])
        assert reason == ("tool_calls" if wish == "call" else "stop"), told
        if wish == "schema":
            jsonschema.validate(json.loads(told["content"]), SCHEMA)
        elif wish == "call":
            jsonschema.validate(json.loads(told["arguments"]), SCHEMA)
        else:
            assert re.fullmatch("(ab|c){4,8}", told["content"])
    assert len(thoughts - {""}) > 1  # they were free


@pytest.mark.slow
def test_guesses_were_right(servers, tokenizer):
    """Else the test above would say nothing."""
    for server in servers.values():
        answered(server, asked(tokenizer, "schema", 0))
    for (guesses, _), server in servers.items():
        server.settle()
        counters = server.service.model.engine.stats().counters
        assert (counters.num_accepted_tokens > 0) == (guesses == "with")
