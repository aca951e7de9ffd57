"""The engine under asyncio: streams, aborts in every state, failures and draining; never a hang."""

import asyncio
import threading
import time

import numpy as np
import pytest

from jaxdist.data.tokenizer import BytesTokenizer
from jaxdist.inference.async_engine import AsyncEngine
from jaxdist.inference.engine import Engine
from jaxdist.inference.errors import EngineError, RequestError
from jaxdist.inference.outputs import RequestOutput
from jaxdist.inference.sampling.sampling_params import SamplingParams
from tests.inference.fake_runner import FakeRunner, expected

WORDS = [*b"abcdefgh "]
LONG = SamplingParams(seed=1, max_tokens=200)


@pytest.fixture
def serve():
    """serve(scenario, **fields of the runner): runs `await scenario(engine)` within 20 s."""

    def run(scenario, **fields):
        async def main():
            runner = FakeRunner(words=WORDS, **fields)
            before = set(threading.enumerate())  # servers of other tests may still run
            engine = AsyncEngine(Engine(runner, BytesTokenizer()))
            assert any(thread.name == "engine" for thread in set(threading.enumerate()) - before)
            try:
                return await asyncio.wait_for(scenario(engine), 20)
            finally:
                engine.close()
                left = set(threading.enumerate()) - before
                assert not any(thread.name == "engine" for thread in left)

        return asyncio.run(main())

    return run


async def text_of(engine, prompt, params, name, **how) -> RequestOutput:
    outputs = [output async for output in engine.generate(prompt, params, name, **how)]
    return outputs[-1]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def blocks_are_free(engine):
    return all(replica.num_used == 0 for replica in engine.stats().replicas)


def test_many_streams_at_once_give_what_each_gives_alone(serve):
    async def scenario(engine):
        params = [SamplingParams(seed=i, max_tokens=5 + i) for i in range(30)]
        outputs = await asyncio.gather(
            *(text_of(engine, f"prompt {i}", params[i], str(i)) for i in range(30))
        )
        for i, output in enumerate(outputs):
            want = expected(list(f"prompt {i}".encode()), params[i], 5 + i, WORDS)
            assert list(output.outputs[0].token_ids) == want
            assert output.finished and output.prompt == f"prompt {i}"
        assert blocks_are_free(engine)

    serve(scenario)


def test_pieces_come_as_they_are_made_and_a_slow_reader_gets_the_newest(serve):
    async def scenario(engine):
        lengths = []
        async for output in engine.generate("abc", LONG, "r"):
            lengths.append(len(output.outputs[0].token_ids))
            if len(lengths) == 3:
                await until(lambda: engine.stats().num_running == 0)
        assert lengths == sorted(set(lengths))
        assert lengths[0] < 50 and lengths[-1] == 200 and len(lengths) == 4

    serve(scenario, delay=lambda: time.sleep(0.001))


@pytest.mark.parametrize("slots", [1, 4])
def test_who_leaves_is_aborted_in_every_state(serve, slots):
    """By closing the stream, by cancelling its reader, and by name; running and queued."""

    async def scenario(engine):
        streams = [engine.generate("abc", LONG, str(i)) for i in range(4)]
        first = asyncio.create_task(anext(streams[0]))
        readers = [asyncio.create_task(text_of(engine, "xyz", LONG, f"t{i}")) for i in range(3)]
        await first
        await streams[0].aclose()
        await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 3)
        readers[1].cancel()  # with one slot it is still queued: the running one goes on
        await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 2)
        assert engine.stats().num_running == min(2, slots)
        engine.abort("t2")
        engine.abort("unknown")
        output = await readers[2]
        assert output.outputs[0].finish_reason == "abort" and output.finished
        output = await readers[0]
        assert len(output.outputs[0].token_ids) == 200
        await until(lambda: blocks_are_free(engine))
        assert engine.stats().counters.finished == {"abort": 3, "length": 1}

    serve(scenario, max_num_seqs=slots, delay=lambda: time.sleep(0.0005))


def test_what_is_wrong_is_said_to_who_asked_and_to_nobody_else(serve):
    async def scenario(engine):
        reader = asyncio.create_task(text_of(engine, "abc", LONG, "r"))
        await until(lambda: engine.stats().num_running)
        with pytest.raises(RequestError, match="no tokens"):
            await text_of(engine, "", LONG, "empty")
        with pytest.raises(RequestError, match="the id r is running"):
            await text_of(engine, "abc", LONG, "r")
        assert len((await reader).outputs[0].token_ids) == 200
        assert not engine.errored

    serve(scenario, delay=lambda: time.sleep(0.0005))


def test_a_failing_step_ends_every_stream_with_its_error_and_is_logged_once(serve, caplog):
    calls = []

    def delay():
        calls.append(time.sleep(0.001))
        if len(calls) > 20:
            raise FloatingPointError("the device is gone")

    async def scenario(engine):
        readers = [
            asyncio.create_task(text_of(engine, "abc", LONG, str(i))) for i in range(12)
        ]  # more than there are slots
        for error in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(error, EngineError)
            assert isinstance(error.__cause__, FloatingPointError)
        assert engine.errored
        with pytest.raises(EngineError, match="the device is gone"):
            await text_of(engine, "abc", LONG, "late")
        assert not await engine.drain(5)
        engine.abort("0")

    serve(scenario, delay=delay)
    (line,) = (record for record in caplog.records if record.name == "jaxdist.engine")
    assert line.exc_info and isinstance(line.exc_info[1], FloatingPointError)


def test_draining_finishes_what_runs_and_takes_nothing_new(serve):
    async def scenario(engine):
        readers = [asyncio.create_task(text_of(engine, "abc", LONG, str(i))) for i in range(12)]
        await asyncio.sleep(0)
        drained = asyncio.create_task(engine.drain(10))
        await until(lambda: engine.draining)
        with pytest.raises(EngineError, match="no new request is taken"):
            await text_of(engine, "abc", LONG, "late")
        assert await drained
        for reader in readers:
            assert len((await reader).outputs[0].token_ids) == 200
        assert not engine.errored

    serve(scenario)


def test_what_has_not_ended_in_time_is_aborted(serve):
    async def scenario(engine):
        reader = asyncio.create_task(text_of(engine, "abc", LONG, "r"))
        await until(lambda: engine.stats().num_running)
        assert not await engine.drain(0.05)
        assert (await reader).outputs[0].finish_reason == "abort"
        await until(lambda: blocks_are_free(engine))

    serve(scenario, delay=lambda: time.sleep(0.01))


def test_closing_ends_the_streams(serve):
    async def scenario(engine):
        reader = asyncio.create_task(text_of(engine, "abc", LONG, "r"))
        await until(lambda: engine.stats().num_running)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="the engine was closed"):
            await reader
        assert not engine.errored

    serve(scenario, delay=lambda: time.sleep(0.001))


def test_embeddings_and_several_continuations(serve):
    async def scenario(engine):
        first, again = await engine.embed("abc"), await engine.embed("abc", "last")
        np.testing.assert_array_equal(first, again)
        params = SamplingParams(seed=1, n=3, max_tokens=5)
        output = await text_of(engine, "abc", params, "r", stream=False)
        assert len({one.text for one in output.outputs}) == 3

    serve(scenario)


def test_a_loop_that_is_gone_harms_no_other():
    engine = AsyncEngine(
        Engine(FakeRunner(words=WORDS, delay=lambda: time.sleep(0.001)), BytesTokenizer())
    )
    loop = asyncio.new_event_loop()
    stream = engine.generate("abc", LONG, "lost")
    loop.run_until_complete(anext(stream))
    loop.close()
    output = asyncio.run(text_of(engine, "abc", LONG, "r"))
    assert len(output.outputs[0].token_ids) == 200
    engine.close()
    assert not engine.errored
