"""A server process over a runner without a device.

fake_server.py PORT SECONDS_A_STEP [GRACE [LEAK]]: it keeps LEAK bytes of each request, so that it
is seen whether who looks for leaks finds them.
"""

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxdist.data.tokenizer import BytesTokenizer  # noqa: E402
from jaxdist.inference.async_engine import AsyncEngine  # noqa: E402
from jaxdist.inference.engine import Engine  # noqa: E402
from jaxdist.server.chat import Chat  # noqa: E402
from jaxdist.server.lifecycle import open_socket, run  # noqa: E402
from jaxdist.server.service import Model, ServerOptions, Service  # noqa: E402
from jaxdist.server.token_text import TokenText  # noqa: E402
from tests.inference.fake_runner import FakeRunner  # noqa: E402


def load() -> Model:
    """Writes letters, spaces and line ends; never an end."""
    tokenizer = BytesTokenizer()
    runner = FakeRunner(
        words=[*range(97, 123), 32, 32, 32, 10],
        max_model_len=4096,
        max_num_seqs=16,
        num_blocks=1200,
        delay=lambda: time.sleep(float(sys.argv[2])),
    )
    engine = AsyncEngine(Engine(runner, tokenizer))
    chat, text_of = Chat(tokenizer, {}), TokenText(tokenizer)
    return Model(
        engine=engine, tokenizer=tokenizer, chat=chat, text_of=text_of, defaults={"top_k": 30}
    )


class Leak(logging.Handler):
    """Keeps so many bytes for each line of the log."""

    def __init__(self, size: int):
        super().__init__()
        self._size, self._kept = size, []

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(b"x" * self._size)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    if len(sys.argv) > 4:
        log = logging.getLogger("jaxdist.server")
        log.addHandler(Leak(int(sys.argv[4])))
        log.setLevel(logging.INFO)
    options = ServerOptions(names=("fake",), grace=float((*sys.argv, "30")[3]))
    run(Service(options), open_socket("127.0.0.1", int(sys.argv[1])), load)
