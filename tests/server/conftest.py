"""A server on a free port over a runner without a device; a small vocabulary."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from jaxdist.data.tokenizer import BytesTokenizer, JsonTokenizer, Tokenizer
from jaxdist.inference.async_engine import AsyncEngine
from jaxdist.inference.engine import Engine
from jaxdist.server.app import make_app
from jaxdist.server.chat import Chat
from jaxdist.server.lifecycle import open_socket, protocol
from jaxdist.server.service import Model, ServerOptions, Service
from jaxdist.server.token_text import TokenText
from tests.inference.fake_runner import FakeRunner

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|tool|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def inner() -> Callable[[], tokenizers.Tokenizer]:
    """inner(): a token a byte, and the special tokens."""

    def make() -> tokenizers.Tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {char: i for i, char in enumerate(alphabet)}
        made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(list(SPECIAL))
        return made

    return make


@pytest.fixture(scope="session")
def tokenizer(inner) -> JsonTokenizer:
    """As a tokenizer.json gives it; texts open with no bos."""
    made = inner()
    eos_id = made.token_to_id("<|im_end|>")
    return JsonTokenizer(made, name="small", eos_id=eos_id, bos_id=None, fingerprint="small")


@dataclass
class Server:
    """A running one."""

    url: str
    service: Service
    client: httpx.Client

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """POST as JSON."""
        return self.client.post(path, json=body, **options)

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of a stream's events."""
        text = self.post(path, body | {"stream": True}).text
        return [line.removeprefix("data: ") for line in text.split("\n\n") if line]

    def settle(self) -> None:
        """Wait until nothing runs; then no block may be held."""
        model = self.service.model
        assert model is not None
        for _ in range(1000):
            stats = model.engine.stats()
            used = sum(replica.num_used for replica in stats.replicas)
            if not (stats.num_running or stats.num_waiting or used or self.service.num_open):
                return
            time.sleep(0.01)
        raise AssertionError(f"left behind: {stats}, {self.service.num_open} open")


def fake_model(tokenizer: Tokenizer, template: str | None, **runner: Any) -> Model:
    """Over a runner without a device."""
    fake = FakeRunner(vocab_size=tokenizer.vocab_size, **runner)
    return Model(
        engine=AsyncEngine(Engine(fake, tokenizer)),
        tokenizer=tokenizer,
        chat=Chat(tokenizer, {}, template=template),
        text_of=TokenText(tokenizer),
    )


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., Server]]:
    """serve(options, ...): a server that lasts as long as the tests; of `model`, or of a fake."""
    running: list[tuple[httpx.Client, uvicorn.Server, threading.Thread, socket.socket]] = []

    def start(
        options: ServerOptions,
        *,
        tokenizer: Tokenizer | None = None,
        template: str | None = None,
        model: Model | None = None,
        **runner: Any,
    ) -> Server:
        service = Service(options)
        used = tokenizer or BytesTokenizer()
        sock = open_socket("127.0.0.1", 0)
        server = uvicorn.Server(protocol(make_app(service)))
        started = threading.Event()

        async def main() -> None:
            served = model or fake_model(used, template, **runner)
            await served.chat.start()
            service.model = served
            started.set()
            await server.serve(sockets=[sock])
            served.engine.close()

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        assert started.wait(60)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        client = httpx.Client(base_url=url, timeout=60)

        running.append((client, server, thread, sock))
        return Server(url, service, client)

    yield start
    for client, server, _, _ in running:  # all at once
        client.close()
        server.should_exit = True
    end = time.monotonic() + 20  # for all of them together
    for *_, thread, sock in running:
        thread.join(max(0.0, end - time.monotonic()))
        sock.close()


@pytest.fixture(scope="session")
def server(serve, tokenizer) -> Server:
    """One that writes lower-case letters and ends."""
    letters = [tokenizer.encode(char)[0] for char in "abcdefgh"]
    return serve(
        ServerOptions(names=("small", "alias")),
        tokenizer=tokenizer,
        template=CHATML,
        words=[*letters, tokenizer.eos_id],
        max_model_len=1024,
        num_blocks=600,
    )
