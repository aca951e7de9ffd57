"""Numbers for Prometheus under vLLM's names, so that dashboards made for it show them."""

import contextlib
from collections.abc import AsyncGenerator, Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxdist.inference.outputs import RequestOutput
from jaxdist.inference.preparation import Prepared
from jaxdist.inference.stats import EngineStats
from jaxdist.server.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_FIRST += (20, 40, 80, 160, 640, 2560)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_COUNT = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Observes requests as they pass; asks the engine when it is scraped."""

    def __init__(self, service: Service):
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(service))  # type: ignore[arg-type]
        self._first = self._histogram("time_to_first_token_seconds", _FIRST)
        self._between = self._histogram("inter_token_latency_seconds", _TOKEN)
        self._per_token = self._histogram("request_time_per_output_token_seconds", _TOKEN)
        self._whole = self._histogram("e2e_request_latency_seconds", _REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", _REQUEST)
        self._inference = self._histogram("request_inference_time_seconds", _REQUEST)
        self._prefill = self._histogram("request_prefill_time_seconds", _REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", _REQUEST)
        self._prompt = self._histogram("request_prompt_tokens", _COUNT)
        self._generated = self._histogram("request_generation_tokens", _COUNT)
        self._longest = self._histogram("request_max_num_generation_tokens", _COUNT)
        self._most = self._histogram("request_params_max_tokens", _COUNT)
        self._n = self._histogram("request_params_n", _COUNT[:5])

    def _histogram(self, name: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}",
            name.replace("_", " "),
            ["model_name", "engine"],
            buckets=tuple(buckets),
            registry=self._registry,
        )
        return histogram.labels(self._service.options.names[0], "0")

    async def timed(
        self, outputs: AsyncGenerator[RequestOutput, None], prepared: Prepared
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, observed."""
        if prepared.pooling is None:
            self._n.observe(len(prepared.params))
            self._most.observe(prepared.max_tokens)
        num_tokens, before = 0, None
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                count = sum(len(choice.token_ids) for choice in output.outputs)
                times = output.metrics
                if count > num_tokens and times is not None and times.last_token_time is not None:
                    if before is None:
                        num_tokens, before = 1, times.first_token_time or times.last_token_time
                    # Tokens that came together share the time.
                    new, spent = count - num_tokens, times.last_token_time - before
                    for _ in range(new):
                        self._between.observe(spent / new)
                    num_tokens, before = count, times.last_token_time
                if output.finished:
                    self._finished(output, count)
                yield output

    def _finished(self, output: RequestOutput, num_tokens: int) -> None:
        times = output.metrics
        self._prompt.observe(len(output.prompt_token_ids))
        self._generated.observe(num_tokens)
        self._longest.observe(max(len(choice.token_ids) for choice in output.outputs))
        if times is None or times.finished_time is None:
            return
        self._whole.observe(times.finished_time - times.arrival_time)
        began, first, last = (
            times.first_scheduled_time,
            times.first_token_time,
            times.last_token_time,
        )
        if began is not None:
            self._queue.observe(began - times.arrival_time)
        if began is None or first is None or last is None:
            return
        self._first.observe(first - times.arrival_time)
        self._inference.observe(last - began)
        self._prefill.observe(first - began)
        self._decode.observe(last - first)
        if num_tokens > 1:
            self._per_token.observe((last - first) / (num_tokens - 1))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector:
    """Reads the engine's own numbers at each scrape."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """All of them; nothing while the model loads."""
        model = self._service.model
        if model is None:
            return
        stats = model.engine.stats()
        name = self._service.options.names[0]
        for metric, value in _gauges(stats).items():
            yield self._one(GaugeMetricFamily, metric, value, name)
        for metric, value in _counters(stats).items():
            yield self._one(CounterMetricFamily, metric, value, name)
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Finished sequences",
            labels=["model_name", "engine", "finished_reason"],
        )
        for reason in ("stop", "length", "abort"):
            finished.add_metric([name, "0", reason], stats.counters.finished[reason])
        yield finished
        runner = model.engine.engine.runner
        about = {"block_size": runner.block_size, "num_gpu_blocks": runner.num_blocks - 1}
        labels = {"model_name": name, "engine": "0"} | {k: str(v) for k, v in about.items()}
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Blocks of a replica, as labels", labels=list(labels)
        )
        config.add_metric(list(labels.values()), 1)
        yield config

    @staticmethod
    def _one(kind: type, metric: str, value: float, name: str) -> Metric:
        words = metric.partition(":")[2].replace("_", " ")
        family = kind(metric, words.capitalize(), labels=["model_name", "engine"])
        family.add_metric([name, "0"], value)
        return family


def _gauges(stats: EngineStats) -> dict[str, float]:
    blocks = sum(replica.num_blocks for replica in stats.replicas)
    used = sum(replica.num_used for replica in stats.replicas)
    return {
        "vllm:num_requests_running": stats.num_running,
        "vllm:num_requests_waiting": stats.num_waiting,
        "vllm:kv_cache_usage_perc": used / blocks if blocks else 0.0,
        "jaxdist:kv_cache_waste_ratio": max((r.waste for r in stats.replicas), default=0.0),
        "jaxdist:padding_ratio": stats.runner.get("padding_ratio", 0.0),
    }


def _counters(stats: EngineStats) -> dict[str, float]:
    counters = stats.counters
    return {
        "vllm:num_preemptions": stats.num_preemptions,
        "vllm:prefix_cache_queries": stats.prefix_queries,
        "vllm:prefix_cache_hits": stats.prefix_hits,
        "vllm:prompt_tokens": counters.prompt_tokens,
        "vllm:generation_tokens": counters.generation_tokens,
        "vllm:spec_decode_num_drafts": counters.num_drafts,
        "vllm:spec_decode_num_draft_tokens": counters.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": counters.num_accepted_tokens,
        "jaxdist:compilations": stats.runner.get("num_compilations", 0.0),
        "jaxdist:engine_steps": counters.num_steps,
        "jaxdist:host_seconds": counters.host_seconds,
        "jaxdist:runner_seconds": counters.runner_seconds,
    }
