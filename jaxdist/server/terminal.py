"""A chat in the terminal: one user, one engine, the model's own template."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from jaxdist.inference.engine import Engine
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.stream import stream
from jaxdist.server.chat import Chat
from jaxdist.server.messages import Message

ASK = "\n> "


def converse(
    engine: Engine,
    files: Mapping[str, bytes],
    sampling: SamplingParams,
    system: str | None = None,
    ask: Callable[[str], str] = input,
) -> Iterator[str]:
    """Answers in pieces, a question being asked for in between, until the input ends (Ctrl-D).

    Ctrl-C ends an answer, which stays in the chat as far as it came; at a question it ends all.
    Keys and values of the turns before are in the engine's prefix cache.

    files: The model's small files, with its template, as `ModelSource.companions` gives them.
    """
    assert engine.tokenizer is not None
    chat = Chat(engine.tokenizer, files)
    sampling = replace(sampling, stop=(*sampling.stop, *chat.stops))
    messages = [] if system is None else [Message(role="system", content=system)]
    with asyncio.Runner() as runner:
        runner.run(chat.start())
        try:
            while True:
                try:
                    question = ask(ASK)
                except EOFError:
                    return
                if not question.strip():
                    continue
                messages.append(Message(role="user", content=question))
                answer = ""
                try:
                    for piece in stream(engine, runner.run(chat.prompt(messages)), sampling):
                        answer += piece
                        yield piece
                except KeyboardInterrupt:
                    yield " ..."
                messages.append(Message(role="assistant", content=answer))
        finally:
            runner.run(chat.close())
