"""The chat in a terminal: each answer is what the whole chat so far leads to."""

import asyncio
from collections.abc import Iterator

import pytest

from jaxdist.inference.engine import Engine
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.stream import stream
from jaxdist.server.chat import Chat
from jaxdist.server.messages import Message
from jaxdist.server.terminal import converse
from tests.inference.fake_runner import FakeRunner

from .conftest import CHATML

SAMPLING = SamplingParams(max_tokens=6, temperature=0)
FILES = {"chat_template.jinja": CHATML.encode()}


@pytest.fixture
def engine(tokenizer) -> Engine:
    return Engine(FakeRunner(vocab_size=tokenizer.vocab_size, words=range(60, 90)), tokenizer)


def asking(*questions: str):
    """What asks these, then ends the input."""
    left: Iterator[str] = iter(questions)

    def ask(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return ask


def test_answers_follow_from_all_turns_before(engine, tokenizer):
    text = "".join(converse(engine, FILES, SAMPLING, "Be brief.", asking("Hello", " ", "Why?")))

    async def expected() -> str:
        chat, told = Chat(tokenizer, FILES), [Message(role="system", content="Be brief.")]
        await chat.start()
        answers = []
        for question in ("Hello", "Why?"):
            told.append(Message(role="user", content=question))
            answers.append("".join(stream(engine, await chat.prompt(told), SAMPLING)))
            told.append(Message(role="assistant", content=answers[-1]))
        await chat.close()
        return "".join(answers)

    assert text == asyncio.run(expected())
    engine.check_integrity()


def test_ctrl_c_ends_an_answer_and_not_the_chat(engine):
    pieces = converse(engine, FILES, SAMPLING, None, asking("Hello", "Go on"))
    next(pieces)
    assert pieces.throw(KeyboardInterrupt) == " ..."
    assert "".join(pieces)
    assert not engine.has_unfinished_requests()
