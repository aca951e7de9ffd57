"""Benchmarks of serving: what they ask, how they count, what they leave; never how fast."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.scripts.programs import SCRIPTS, module, run

web = pytest.importorskip("aiohttp.web")


# Latencies.


def answer(sent: float, events: list[float], num_tokens: int, **fields: Any) -> Any:
    made = module("bench.serving.latency").Answer
    return made(sent=sent, events=events, num_tokens=num_tokens, **fields)


def test_summary_counts_as_its_words_say():
    latency = module("bench.serving.latency")
    answers = [
        answer(0.0, [0.1, 0.2, 0.4], 3, num_prompt_tokens=10),
        # Three tokens in two events: TPOT is of tokens, ITL of events.
        answer(1.0, [1.5, 2.0], 3, num_prompt_tokens=20),
        answer(1.0, [3.0], 1, num_prompt_tokens=5),  # one token: no TPOT
        answer(0.5, [], 0, error="status 500: no"),
    ]
    figures = latency.summary(answers, {"ttft": 600.0, "tpot": 200.0})
    assert (figures["requests"], figures["failed"]) == (4, 1)
    assert figures["seconds"] == pytest.approx(3.0)
    assert figures["generated_tokens_per_second"] == pytest.approx(7 / 3)
    assert figures["tokens_per_second"] == pytest.approx(42 / 3)
    assert figures["ttft_ms"]["p50"] == pytest.approx(500)
    assert figures["ttft_ms"]["mean"] == pytest.approx(1e3 * (0.1 + 0.5 + 2.0) / 3)
    assert figures["tpot_ms"]["mean"] == pytest.approx(1e3 * (0.15 + 0.25) / 2)
    assert figures["itl_ms"]["mean"] == pytest.approx(1e3 * (0.1 + 0.2 + 0.5) / 3)
    assert figures["e2el_ms"]["p50"] == pytest.approx(1000)
    # The second misses its TPOT, the third its TTFT.
    assert (figures["good"], figures["goodput"]) == (1, pytest.approx(1 / 3))
    text = latency.table(figures)
    assert "4 requests, 1 failed" in text and "status 500: no" in text and "goodput 0.33" in text
    json.dumps(figures)


def test_percentiles_are_those_of_numpy():
    values = list(np.random.default_rng(0).exponential(size=501))
    found = module("bench.serving.latency").distribution(values)
    for p in (50, 90, 99):
        assert found[f"p{p}"] == pytest.approx(np.percentile(values, p))
    assert module("bench.serving.latency").distribution([]) is None


def test_run_of_failures_has_a_table_too():
    latency = module("bench.serving.latency")
    figures = latency.summary([answer(0.0, [], 0, error="refused")])
    assert latency.table(figures).splitlines() == ["1 requests, 1 failed", "  refused"]


@pytest.mark.parametrize("word", ["ttft", "ttft:x", "itl:5", "tpot:0", "tpot:nan", "e2el:inf"])
def test_wrong_limits_are_refused(word: str):
    with pytest.raises(ValueError, match=word):
        module("bench.serving.latency").parse_limits([word])


# Arrivals and prompts.


def test_arrivals_are_poisson_or_at_once():
    arrivals = module("bench.serving.arrivals")
    rng = np.random.default_rng(0)
    assert not arrivals.arrival_times(5, float("inf"), rng).any()
    times = arrivals.arrival_times(20_000, 8.0, rng)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.03)  # exponential gaps
    same = arrivals.arrival_times(10, 8.0, np.random.default_rng(3))
    np.testing.assert_array_equal(same, arrivals.arrival_times(10, 8.0, np.random.default_rng(3)))


def test_random_prompts_share_their_beginning_only():
    arrivals = module("bench.serving.arrivals")
    rng = np.random.default_rng(0)
    ids = arrivals.random_ids(3, 20, 12, 1000, rng)
    assert all(len(prompt) == 20 and prompt[:12] == ids[0][:12] for prompt in ids)
    assert len({tuple(prompt) for prompt in ids}) == 3
    assert all(0 <= i < 1000 for prompt in ids for i in prompt)
    words = [text.split() for text in arrivals.random_words(3, 20, 12, rng)]
    assert all(len(prompt) == 20 and prompt[:12] == words[0][:12] for prompt in words)


def test_prompts_of_races_are_cold_unless_shared():
    ring, spec = module("bench.serving.ring"), module("bench.serving.spec")
    texts = module("bench.serving.arrivals").Texts(range(5000))
    cold = spec.Task(batch=2, prompt_tokens=64, new_tokens=1)
    hot = replace(cold, shared=True)
    rounds = [ring.prompts(texts, "r", cold, number) for number in (-1, 0, 1)]
    assert rounds[1] == ring.prompts(texts, "r", cold, 0)
    starts = [prompt[0] for some in rounds for prompt in some]
    assert len(set(starts)) == len(starts)
    shared = [ring.prompts(texts, "r", hot, number) for number in (-1, 0, 1)]
    heads = {tuple(prompt[: -spec.OWN_TOKENS]) for some in shared for prompt in some}
    tails = {tuple(prompt[-spec.OWN_TOKENS :]) for some in shared for prompt in some}
    assert len(heads) == 1 and len(tails) == 6
    assert heads.isdisjoint(tuple(p[: -spec.OWN_TOKENS]) for some in rounds for p in some)


# Races.


def first_race(**fields: Any) -> Any:
    plan, spec = module("bench.serving.plan"), module("bench.serving.spec")
    models = plan.Models(folder="folder", gguf="file.gguf")
    others = (spec.EngineSpec(framework="llamacpp", model="file.gguf"),)
    return replace(next(plan.races(models, others)), **fields)


def reply(seconds: float, tokens: list[list[int]], **counters: float) -> Any:
    made = module("bench.serving.spec").Reply
    counts = [len(ids) for ids in tokens]
    return made(seconds=seconds, tokens=tokens, counts=counts, counters=counters)


def test_specs_survive_the_way_to_their_process():
    spec, worker = module("bench.serving.spec"), module("bench.serving.gpu_worker")
    one = spec.EngineSpec(framework="vllm", model="m", python="/p", max_num_seqs=3)
    assert spec.EngineSpec.from_json(one.to_json()) == one
    two = worker.DecodeSpec(framework="jaxdist", fields={}, context=9, steps=2, batches=(1, 2))
    assert worker.DecodeSpec.from_json(two.to_json()) == two


def test_every_target_is_that_of_a_race():
    plan, spec = module("bench.serving.plan"), module("bench.serving.spec")
    models = plan.Models(folder="folder", gguf="file.gguf")
    others = plan.peers(models, "/llama", "/vllm")
    every = list(plan.races(models, others))
    assert [race.name for race in every] == [
        *("b1", "b16", "b32", "prefill512", "prefix512", "http32")
    ]
    found = {
        (entry.spec.framework, race.name): entry.target
        for race in every
        for entry in race.others
        if entry.target is not None
    }
    own = {("jaxdist", "prefix512"): 5.0, ("jaxdist", "http32"): 0.9}
    assert found == plan.TARGETS | own
    assert plan.peers(models, None, None) == (
        spec.EngineSpec(framework="transformers", model="folder"),
    )


def test_ratio_is_of_speeds_in_paired_rounds():
    race = first_race()
    other = replace(race.others[0], target=1.5)
    pairs = [
        (reply(1.0, []), reply(2.0, [])),
        (reply(2.0, []), reply(2.0, [])),
        (reply(1.0, []), reply(4.0, [])),
    ]
    outcome = module("bench.serving.report").Outcome(race=race, other=other, pairs=pairs)
    assert outcome.ratios == [2.0, 1.0, 4.0]
    assert outcome.met is True
    assert "2.00 (1.00 .. 4.00)" in outcome.line() and outcome.line().endswith("met")
    assert json.loads(json.dumps(outcome.to_json()))["met"] is True
    missed = replace(outcome, other=replace(other, target=2.5))
    assert missed.line().endswith("MISSED")
    invalid = replace(outcome, problem="other tokens")
    assert invalid.met is None and "INVALID: other tokens" in invalid.line()
    absent = replace(outcome, pairs=[], problem="no module")
    assert absent.line().endswith("not run: no module")
    json.dumps(absent.to_json())


def test_host_share_is_the_median_of_turns():
    report = module("bench.serving.report")
    race = first_race()
    pairs = [(reply(2.0, [], host_seconds=h), reply(1.0, [])) for h in (0.02, 0.2, 0.04)]
    outcome = report.Outcome(race=race, other=race.others[0], pairs=pairs)
    assert report.host_share(outcome) == pytest.approx(0.02)
    assert report.host_share(replace(outcome, pairs=[])) is None


def test_contenders_must_do_the_same_work():
    ring, spec = module("bench.serving.ring"), module("bench.serving.spec")
    task = spec.Task(batch=2, prompt_tokens=4, new_tokens=2)
    good = reply(1.0, [[5, 6], [7, 8]])
    near = reply(1.0, [[5, 9], [1, 8]])
    assert not ring.mismatch(task, task, [(good, near)])
    other = reply(1.0, [[4, 6], [1, 8]])
    assert "0 of 2 first tokens" in ring.mismatch(task, task, [(good, other)])
    short = reply(1.0, [[5], [7, 8]])
    assert "tokens in place of 2" in ring.mismatch(task, task, [(good, short)])
    compiled = reply(1.0, [[5, 6], [7, 8]], compilations=2)
    assert "2 compilations" in ring.mismatch(task, task, [(compiled, good)])
    text = replace(good, tokens=None)
    assert not ring.mismatch(task, task, [(text, good)])


def test_ring_circles_and_goes_on_without_who_fails(monkeypatch: pytest.MonkeyPatch):
    ring, child = module("bench.serving.ring"), module("bench.child")
    turns, closed = [], []

    class Fake:
        about = {"kind": "fake"}

        def __init__(self, spec: Any):
            self.spec = spec

        def turn(self, prompts: list[list[int]], new_tokens: int) -> Any:
            turns.append(self.spec.framework)
            if self.spec.framework == "llamacpp" and len(turns) > 3:
                raise child.ContenderFailed("it fell")
            return reply(1.0, [[1] * new_tokens for _ in prompts])

        def close(self, patience: float = 10) -> None:
            closed.append(self.spec.framework)

    monkeypatch.setattr(ring, "start", lambda spec, cache: Fake(spec))
    plan = module("bench.serving.plan")
    models = plan.Models(folder="folder", gguf="file.gguf")
    every = list(plan.races(models, plan.peers(models, "/llama", None), quick=True))
    texts = module("bench.serving.arrivals").Texts(range(5000))
    with ring.Ring(texts) as one:
        first, second = one.race(every[0], 2)
        assert turns == ["jaxdist", "llamacpp", "transformers", "jaxdist", "llamacpp"] + [
            *("transformers", "jaxdist", "transformers")
        ]
        assert (len(first.pairs), first.problem) == (0, "llama.cpp bf16: it fell")
        assert (len(second.pairs), second.problem) == (2, "")
        assert closed == ["llamacpp"]
        [prefix] = one.race(every[3], 1)
        assert prefix.race.name == "prefix512" and prefix.pairs and not prefix.problem
        assert sorted(closed) == ["llamacpp", "transformers"]
    assert sorted(closed) == ["jaxdist", "llamacpp", "transformers"]


# The client.


@pytest.fixture
def stub() -> Iterator[SimpleNamespace]:
    """A server that answers with a token every few milliseconds; it keeps what it was asked."""
    seen = SimpleNamespace(asked=[], open=0, most_open=0, url="")

    async def stream(request: Any) -> Any:
        asked = await request.json()
        seen.asked.append((request.path, asked, request.headers.get("Authorization")))
        if asked["model"] == "absent":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        seen.open += 1
        seen.most_open = max(seen.most_open, seen.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(body: dict) -> None:
            await response.write(f"data: {json.dumps(body)}\n\n".encode())

        chat = "messages" in asked
        if chat:
            await event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(asked["max_tokens"]):
            await asyncio.sleep(0.004)
            text = f" {number}"
            said = {"delta": {"content": text}} if chat else {"text": text}
            await event({"choices": [said | {"finish_reason": None}]})
        end = {"delta": {}} if chat else {"text": ""}
        await event({"choices": [end | {"finish_reason": "length"}]})
        usage = {"prompt_tokens": 7, "completion_tokens": asked["max_tokens"]}
        await event({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        seen.open -= 1
        return response

    async def models(request: Any) -> Any:
        return web.json_response({"data": [{"id": "stub"}]})

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models)])
        app.add_routes([web.post(f"/v1/{p}", stream) for p in ("completions", "chat/completions")])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        seen.url = f"http://{host}:{port}"
        ready.set()
        await done.wait()
        await runner.cleanup()

    loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield seen
    loop.call_soon_threadsafe(done.set)
    thread.join(10)
    loop.close()


@pytest.mark.parametrize("chat", [False, True])
def test_client_times_tokens_not_roles_and_ends(stub: SimpleNamespace, chat: bool):
    client = module("bench.serving.client")
    endpoint = client.Endpoint(url=stub.url, chat=chat, api_key="secret")
    prompts = ["a"] * 6 if chat else [[1, 2]] * 6
    load = client.Load(prompts=prompts, arrivals=[0.0] * 6, max_tokens=5, max_concurrency=2)
    answers = client.drive(endpoint, load)
    assert [len(a.events) for a in answers] == [5] * 6 and not any(a.error for a in answers)
    assert [(a.num_tokens, a.num_prompt_tokens) for a in answers] == [(5, 7)] * 6
    assert all(a.seconds["ttft"] >= 0.003 and a.seconds["tpot"] >= 0.003 for a in answers)
    assert stub.most_open == 2
    path, asked, key = stub.asked[0]
    assert (path, key) == ("/v1/chat/completions" if chat else "/v1/completions", "Bearer secret")
    assert (asked["model"], asked["ignore_eos"], asked["stream"]) == ("stub", True, True)


def test_requests_are_sent_when_they_arrive(stub: SimpleNamespace):
    client = module("bench.serving.client")
    arrivals = [0.0, 0.15, 0.3]
    load = client.Load(prompts=[[1]] * 3, arrivals=arrivals, max_tokens=1)
    sent = [a.sent for a in client.drive(client.Endpoint(url=f"{stub.url}/v1/"), load)]
    np.testing.assert_allclose(np.diff(sent), 0.15, atol=0.1)
    assert stub.most_open == 1


def test_what_fails_is_counted_and_told(stub: SimpleNamespace):
    client = module("bench.serving.client")
    load = client.Load(prompts=[[1]], arrivals=[0.0], max_tokens=1)
    [one] = client.drive(client.Endpoint(url=stub.url, model="absent"), load)
    assert one.error.startswith("status 404") and "no such model" in one.error
    with pytest.raises(client.EndpointError, match="/v1/models"):
        client.drive(client.Endpoint(url="http://127.0.0.1:9"), load)


def test_endpoint_part_prints_and_writes(stub: SimpleNamespace, tmp_path: Path):
    record = tmp_path / "figures.json"
    done = run(
        *("bench_serve.py", "endpoint", "--url", stub.url, "--num-prompts", "8"),
        *("--output-tokens", "4", "--request-rate", "200", "--json", str(record)),
        *("--goodput", "ttft:5000"),
    )
    assert done.returncode == 0, done.stderr
    assert "8 requests, 0 failed" in done.stdout and "goodput" in done.stdout
    figures = json.loads(record.read_text())
    assert (figures["generated_tokens"], figures["good"]) == (32, 8)
    assert len(stub.asked) == 8 + figures["options"]["num_warm_up"]


# The doors.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("endpoint", "--url", "http://127.0.0.1:9"), "127.0.0.1:9/v1/models"),
        (("endpoint", "--goodput", "ttft:x"), "no number of milliseconds"),
        (("endpoint", "--shared-tokens", "99"), "--shared-tokens is more than --prompt-tokens"),
        (("endpoint", "--request-rate", "0"), "--request-rate"),
        (("--model", "absent.gguf"), "fetch_model.sh"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    try:
        code = module("bench_serve").main()
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_bench_serve_gpu_refuses_in_one_line_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    refused = run("bench_serve_gpu.py")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert not refused.stdout


def test_roofline_is_what_a_step_reads_over_its_time():
    gpu, worker = module("bench_serve_gpu"), module("bench.serving.gpu_worker")
    fields = dict(num_hidden_layers=3, num_key_value_heads=2, hidden_size=64, num_attention_heads=4)
    assert gpu.kv_bytes_per_token(fields) == 2 * 3 * 2 * 16 * 2
    spec = worker.DecodeSpec(framework="jaxdist", fields=fields, context=100, steps=3, batches=(2,))
    result = gpu.Result(
        spec=spec, batch=2, seconds=(0.1, 0.2, 0.9), context=100.0, weight_bytes=10_000
    )
    read = 10_000 + 2 * 100 * gpu.kv_bytes_per_token(fields)
    assert result.roofline(1e6) == pytest.approx(read / 0.2 / 1e6)
    assert result.roofline(None) is None
    assert "10 tokens/s" in result.line(1e6, [result]) and "MISSED" in result.line(1e6, [result])
    assert result.line(3e5, [result]).endswith("met")
    peer = replace(result, spec=replace(spec, framework="transformers"), seconds=(0.5,))
    assert "jaxdist is 2.50 times as fast" in peer.line(1e6, [result])
    late = gpu.measured(spec, time.monotonic())
    assert [one.problem for one in late] == ["the time is up"]


def test_bandwidths_are_found_by_the_driver_s_names():
    bandwidth_of = module("bench_serve_gpu").bandwidth_of
    assert bandwidth_of("NVIDIA H200") == 4800e9
    assert bandwidth_of("NVIDIA H100 80GB HBM3") > 3e12
    assert bandwidth_of("NVIDIA GeForce GTX 970") is None


def test_closing_a_child_ends_what_it_has_started():
    child = module("bench.child")
    code = (
        "import subprocess, sys, time\n"
        "grandchild = subprocess.Popen(['sleep', '600'])\n"
        "print(grandchild.pid, flush=True)\n"
        "time.sleep(600)"
    )
    one = child.Child([sys.executable, "-c", code], os.environ)
    [pid] = child.replies([one], time.monotonic() + 30)
    one.close(patience=0)
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:  # it has been killed, and dies in its own time
        time.sleep(0.02)
    assert not alive(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_benchmark_leaves_no_process(number: int, tmp_path: Path):
    """What is left is found by its environment."""
    name, value = "BENCH_TEST_MARK", f"{tmp_path.name}-{number:d}"
    mark = f"{name}={value}"
    code = (
        "import signal, sys, bench_serve\n"
        # In the background of a shell Ctrl-C is ignored, and so it is by those started there.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from bench.serving import engines\n"
        "from bench.child import Child, replies\n"
        "import os, time\n"
        "def main(words):\n"
        "    from bench.serving import ring, contenders, arrivals\n"
        "    with ring.Ring(arrivals.Texts(range(900))) as one:\n"
        "        child = Child([sys.executable, '-c',"
        " 'import time; print(1, flush=True); time.sleep(600)'], os.environ)\n"
        "        one._contenders['x'] = child\n"
        "        replies([child], time.monotonic() + 30)\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(600)\n"
        "engines.main = main\n"
        "sys.argv = ['bench_serve.py']\n"
        "sys.exit(bench_serve.main())"
    )
    env = os.environ | {name: value, "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout and parent.stdout.readline() == b"ready\n"
        assert len(marked(mark)) == 2
        parent.send_signal(number)
        assert parent.wait(30) == 128 + number
    assert not marked(mark)


def marked(mark: str) -> list[int]:
    """Processes with this in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # its new parent may take its time to notice


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["jaxdist", "transformers"])
def test_decode_steps_of_the_gpu_worker_are_timed(framework: str):
    """On the CPU and with a tiny model, for the way through."""
    gpu, worker = module("bench_serve_gpu"), module("bench.serving.gpu_worker")
    fields = dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    spec = worker.DecodeSpec(
        framework=framework, fields=fields, context=48, steps=6, batches=(1, 3), device="cpu"
    )
    results = gpu.measured(spec, time.monotonic() + 300)
    for batch, result in zip((1, 3), results, strict=True):
        assert not result.problem, result.problem
        assert (result.batch, len(result.seconds)) == (batch, 6)
        assert 45 <= result.context <= 48 + 2 * 3
        weights = 128 * 32 + 2 * (32 * (32 + 2 * 16 + 32) + 3 * 32 * 64 + 2 * 32) + 32
        assert result.weight_bytes == 2 * weights
