"""From a request's fields to the engine's sampling parameters.

defaults: Of parameters that a request does not set, where the model has its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxdist.config import UsageError
from jaxdist.inference.sampling.sampling_params import SamplingParams, StructuredOutputsParams
from jaxdist.server.errors import APIError, refused
from jaxdist.server.protocol import ChatRequest, CompletionRequest, Generation
from jaxdist.server.structures import structure_of

# Fields that are passed on under their own names where they are given.
_SAME = (
    "n temperature top_p top_k min_p typical_p repetition_penalty presence_penalty"
    " frequency_penalty seed allowed_token_ids bad_words stop_token_ids"
    " include_stop_str_in_output ignore_eos min_tokens prompt_logprobs skip_special_tokens"
).split()


def of_completion(
    request: CompletionRequest, defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """The parameters of /v1/completions.

    With echo the prompt's log-probabilities are asked for too, and max_tokens=0 only scores it:
    one token is made then, which the caller leaves out.
    """
    if request.suffix:
        raise APIError("suffix is not supported: the models here only continue", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise APIError("best_of is not supported; ask for n and choose", param="best_of")
    fields = _common(request, defaults)
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and request.echo:
        max_tokens = 1
    if request.echo and request.logprobs is not None:
        fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return _build(fields, max_tokens, request.logprobs)


def of_chat(
    request: ChatRequest,
    structured: StructuredOutputsParams | None = None,
    stops: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """The parameters of /v1/chat/completions.

    structured: What the tools ask for. stops: Texts that end an answer besides the request's own.
    """
    fields = _common(request, defaults)
    fields["stop"] = (*fields.get("stop", ()), *stops)
    if structured is not None:
        if fields.get("structured_outputs") is not None:
            raise APIError(
                "a tool that must be called and another structure exclude each other; "
                "leave response_format out",
                param="tool_choice",
            )
        fields["structured_outputs"] = structured
    name = most_field(request)
    max_tokens = getattr(request, name)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _build(fields, max_tokens, logprobs, name)


def most_field(request: ChatRequest) -> str:
    """The field that says how many tokens an answer may have at most."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def showing_special_tokens(params: SamplingParams) -> SamplingParams:
    """The same, where special tokens mark a model's calls of tools or its thoughts."""
    return replace(params, skip_special_tokens=False)


def _build(
    fields: dict[str, Any], max_tokens: int | None, logprobs: int | None, name: str = "max_tokens"
) -> SamplingParams:
    if max_tokens == 0:
        raise APIError(f"{name}=0 must be at least 1", param=name)
    try:
        return SamplingParams(**fields, max_tokens=max_tokens, logprobs=logprobs)
    except UsageError as error:
        raise refused(str(error)) from None


def _common(request: Generation, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {name: getattr(request, name) for name in _SAME}
    fields = dict(defaults or {})
    fields |= {name: value for name, value in given.items() if value is not None}
    if request.stop is not None:
        stops = [request.stop] if isinstance(request.stop, str) else request.stop
        if "" in stops:
            raise APIError("stop must not hold an empty text", param="stop")
        fields["stop"] = tuple(stops)
    if request.logit_bias:
        fields["logit_bias"] = _by_id(request.logit_bias)
    fields["structured_outputs"] = structure_of(request)
    return fields


def _by_id(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise APIError("logit_bias: its keys must be token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
