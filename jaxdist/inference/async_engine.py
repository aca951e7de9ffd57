"""The engine for asyncio: one thread steps it, streams hang on it from event loops."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from jaxdist.inference.engine import Engine
from jaxdist.inference.errors import EngineError
from jaxdist.inference.outputs import RequestOutput
from jaxdist.inference.preparation import Prepared
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.stats import BlockMap, EngineStats

_log = logging.getLogger("jaxdist.engine")
_STRUCTURES = 64  # threads in which structures wait for their trial; all else has its own


class _Stream:
    """Where the outputs of one request arrive; only the newest is kept, since each holds all."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._event = asyncio.Event()
        self._newest: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput | None, error: Exception | None = None) -> None:
        """In the stream's event loop."""
        self._newest, self._error = output or self._newest, error or self._error
        self._event.set()

    async def get(self) -> RequestOutput:
        """The newest output that was not given yet; raises what ended the stream."""
        await self._event.wait()
        self._event.clear()
        output, self._newest = self._newest, None
        if output is not None:
            if self._error is not None:
                self._event.set()
            return output
        assert self._error is not None
        raise self._error


class AsyncEngine:
    """Runs `engine` in a thread of its own from now on; nobody else may step it.

    Methods are called from event loops, `abort`, `stats` and `close` from anywhere.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._streams: dict[str, _Stream] = {}
        self._error: EngineError | None = None
        self._draining = self._closed = self._failed = False
        self._structures = ThreadPoolExecutor(_STRUCTURES, "structure")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine, for what it tells of itself: tokenizer, runner, options."""
        return self._engine

    @property
    def errored(self) -> bool:
        """Whether a step has failed; nothing is served any more."""
        return self._failed

    @property
    def draining(self) -> bool:
        """Whether new requests are turned away."""
        return self._draining or self._closed

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: Hashable = None,
        prompt_text: str | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request, each with all so far, whenever something is new.

        Closing the generator, or cancelling who iterates it, aborts the request. Raises
        RequestError where the request is wrong, EngineError where the engine has failed or closes.
        """
        prepared = await self.prepare(
            request_id,
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            prompt_text=prompt_text,
            stream=stream,
        )
        async for output in self.outputs(prepared):
            yield output

    async def prepare(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, **how: Any
    ) -> Prepared:
        """`Engine.prepare`; in another thread where it may take long."""
        prepare = partial(self._engine.prepare, request_id, prompt, params, **how)
        if params.structured_outputs is not None:
            return await asyncio.get_running_loop().run_in_executor(self._structures, prepare)
        if len(prompt) > 10_000:
            return await asyncio.to_thread(prepare)
        return self._engine.prepare(request_id, prompt, params, **how)

    async def outputs(self, prepared: Prepared) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of a request that `prepare` has checked; as `generate`."""
        stream = _Stream(asyncio.get_running_loop())
        self._submit(lambda: self._add(prepared, stream))
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        except EngineError:
            finished = True
            raise
        finally:
            if not finished:
                self._abort_of(prepared.request_id, stream)

    async def embed(
        self,
        prompt: str | Sequence[int],
        pooling: str = "mean",
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: Hashable = None,
    ) -> np.ndarray:
        """The pooled hidden state of a prompt, float32 [hidden_size]."""
        prepared = await self.prepare(
            request_id or f"embed-{time.monotonic_ns()}-{id(prompt)}",
            prompt,
            SamplingParams(),
            pooling=pooling,
            priority=priority,
            cache_salt=cache_salt,
        )
        async for output in self.outputs(prepared):
            if output.embedding is not None:
                return output.embedding
        raise EngineError("the embedding was aborted")

    def abort(self, request_id: str) -> None:
        """End a request, if there is one; its stream ends with finish_reason "abort"."""
        self._submit(lambda: self._deliver_abort(request_id), late=True)

    def stats(self) -> EngineStats:
        """Numbers of now."""
        return self._engine.stats()

    def block_maps(self) -> list[BlockMap]:
        """Who holds which block, for each replica."""
        return self._engine.block_maps()

    async def drain(self, timeout: float | None = None) -> bool:
        """Turn new requests away and wait until all have ended; False where time ran out.

        What has not ended by then is aborted.
        """
        self._draining = True
        end = None if timeout is None else time.monotonic() + timeout
        passed = threading.Event()  # what was submitted before is then in self._streams
        self._submit(passed.set, late=True)
        while not passed.is_set() or self._streams or self._engine.has_unfinished_requests():
            if self._error is not None:
                return False
            if end is not None and time.monotonic() >= end:
                for request_id in list(self._streams):
                    self.abort(request_id)
                return False
            await asyncio.sleep(0.01)
        return True

    def close(self, timeout: float = 10.0) -> None:
        """End the thread; streams that are left end with EngineError."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)

    def _submit(self, command: Callable[[], None], *, late: bool = False) -> None:
        """Have the engine's thread run `command` before its next step.

        late: also where no new request is taken.
        """
        with self._wake:
            if not late:
                if self._error is not None:
                    raise EngineError(str(self._error)) from self._error.__cause__
                if self._draining or self._closed:
                    raise EngineError("the engine is closing; no new request is taken")
            self._commands.append(command)
            self._wake.notify()

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._next_commands():
                if self._engine.has_unfinished_requests():
                    self._deliver(self._engine.step())
            self._end(EngineError("the engine was closed"))
        except Exception as error:  # whatever fails, nobody may wait for ever
            self._failed = True
            _log.critical("the engine's step failed; nothing is served any more", exc_info=error)
            failure = EngineError(f"the engine's step failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)

    def _next_commands(self) -> bool:
        """Run what was submitted, waiting where there is nothing to do; False to end."""
        with self._wake:
            while not (self._commands or self._closed or self._engine.has_unfinished_requests()):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return not self._closed

    def _add(self, prepared: Prepared, stream: _Stream) -> None:
        if self._error is not None:
            self._send([(stream, None, self._error)])
            return
        try:
            self._engine.add(prepared)
        except ValueError as error:  # such as an id in use
            self._send([(stream, None, error)])
            return
        self._streams[prepared.request_id] = stream

    def _abort_of(self, request_id: str, stream: _Stream) -> None:
        """Abort the request of a stream that nobody reads any more."""

        def command() -> None:
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                self._engine.abort_request(request_id)

        self._submit(command, late=True)

    def _deliver_abort(self, request_id: str) -> None:
        output = self._engine.abort_request(request_id)
        if output is not None:
            self._deliver([output])

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        sent = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            sent.append((stream, output, None))
        self._send(sent)

    def _end(self, error: EngineError) -> None:
        with self._wake:
            self._error = error
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        self._send([(stream, None, error) for stream in self._streams.values()])
        self._streams.clear()

    @staticmethod
    def _send(sent: Sequence[tuple[_Stream, RequestOutput | None, Exception | None]]) -> None:
        """Hand over to the streams' event loops, one call for each."""
        by_loop: dict[asyncio.AbstractEventLoop, list] = {}
        for item in sent:
            by_loop.setdefault(item[0].loop, []).append(item)
        for loop, items in by_loop.items():

            def put(items: list = items) -> None:
                for stream, output, error in items:
                    stream.put(output, error)

            try:
                loop.call_soon_threadsafe(put)
            except RuntimeError:  # the loop was closed: nobody reads these streams
                continue
