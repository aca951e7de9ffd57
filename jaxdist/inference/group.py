"""A request of the caller and its n continuations, which the scheduler knows one by one."""

import numpy as np

from jaxdist.inference.continuation import Continuation
from jaxdist.inference.outputs import Logprobs, RequestMetrics, RequestOutput
from jaxdist.inference.preparation import Prepared


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
