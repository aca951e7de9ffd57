"""A request of the caller and its n continuations, which the scheduler knows one by one."""

import numpy as np

from jaxdist.inference.continuation import Continuation
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.guidance.guide import Guide
from jaxdist.inference.guidance.speculation import NgramIndex
from jaxdist.inference.outputs import Logprobs, RequestMetrics, RequestOutput
from jaxdist.inference.preparation import Prepared
from jaxdist.inference.scheduling.request import Request


def requests_of(
    prepared: Prepared, options: EngineOptions, *, vocab_size: int, num_arrived: int
) -> list[Request]:
    """The n of a request; `num_arrived` came before them."""
    requests: list[Request] = []
    for index, params in enumerate(prepared.params):
        wants_logprobs = params.prompt_logprobs is not None and index == 0
        guide = _guide_of(prepared, options, vocab_size)
        request = Request(
            request_id=prepared.request_id,
            index=index,
            prompt_ids=prepared.prompt_ids,
            params=params if index == 0 else params.varied(prompt_logprobs=None),
            max_tokens=prepared.max_tokens,
            order=(prepared.priority, num_arrived + index),
            salt=prepared.salt,
            pooling=prepared.pooling,
            run_ahead=options.run_ahead and not (guide and guide.guesses),
            guide=guide,
            reuse=not wants_logprobs and prepared.pooling != "mean",
        )
        if index and options.enable_prefix_caching:
            request.leader = requests[0]
        requests.append(request)
    return requests


def _guide_of(prepared: Prepared, options: EngineOptions, vocab_size: int) -> Guide | None:
    """What the host has to say about the tokens of a continuation."""
    speculates = options.num_speculative_tokens > 0
    if prepared.pooling or not (prepared.grammar or prepared.bad_words or speculates):
        return None
    return Guide(
        vocab_size=vocab_size,
        matcher=prepared.grammar.matcher() if prepared.grammar else None,
        bad_words=prepared.bad_words,
        ngrams=NgramIndex(options.prompt_lookup_min, options.prompt_lookup_max)
        if speculates
        else None,
        most_drafts=options.num_speculative_tokens,
    )


class Group:
    """What has become of a request; `num_left` of its continuations go on."""

    def __init__(self, prepared: Prepared, children: list[Continuation]):
        self.prepared, self.children = prepared, children
        self.num_left = len(children)
        self.metrics = RequestMetrics(arrival_time=prepared.arrival_time)
        self.embedding: np.ndarray | None = None
        self.prompt_logprobs: list[Logprobs | None] | None = None
        if prepared.params[0].prompt_logprobs is not None and prepared.pooling is None:
            self.prompt_logprobs = [None]

    def output(self) -> RequestOutput:
        """All of it so far, as a copy."""
        finished = not self.num_left
        logprobs = self.prompt_logprobs
        return RequestOutput(
            request_id=self.prepared.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.prepared.prompt_ids,
            prompt_logprobs=None if logprobs is None else list(logprobs),
            outputs=[child.output() for child in self.children],
            finished=finished,
            num_cached_tokens=max(0, self.children[0].request.num_cached_tokens),
            embedding=self.embedding,
            metrics=self.metrics,
        )
