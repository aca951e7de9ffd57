"""Requests as OpenAI's API shapes them, with vLLM's fields besides.

Types are strict: "1" is no number. Fields that are not known are ignored, since clients send many,
but for those of other servers that would change what is written; null is the default. `sampling.py`
makes the engine's parameters of them; `messages.py` has the parts of a chat, `structures.py` what
an answer must conform to.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from jaxdist.server.messages import Messages, NamedTool, Tool
from jaxdist.server.shape import Shape, field_names, without
from jaxdist.server.structures import Structured


def _some_or_all(count: int) -> int:
    if count < -1 or count == 0:
        raise ValueError("must be at least 1, or -1 for as many as fit")
    return count


def _counted(given: Any) -> Any:
    """Checked before any of them is read, which would hold up other requests."""
    entries = given if isinstance(given, list) else []
    count = len(entries) + sum(len(ids) for ids in entries if isinstance(ids, list))
    if count > _MOST_IDS:
        raise ValueError(f"{count} token ids are too many; at most {_MOST_IDS} are allowed")
    return given


_MOST_IDS = 2**20  # in one request
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Prompts = Annotated[
    str | list[str] | list[TokenId] | list[list[TokenId]], BeforeValidator(_counted)
]
Small = Annotated[int, Field(ge=0, lt=2**31)]
# Tokens of a prompt to keep, its last ones; -1: as many as there is room for.
Last = Annotated[int, Field(lt=2**31), AfterValidator(_some_or_all)]

# What other servers know and this one does not: an answer that passes it over would be another one.
ELSEWHERE = {
    "use_beam_search": "ask for n and choose",
    "logits_processors": "logit_bias, bad_words and allowed_token_ids say which tokens are chosen",
    "prompt_embeds": "give the prompt",
    "chat_template": "the server takes one with --chat-template",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "structural_tag": "give structured_outputs with a grammar",
    "ebnf": "give structured_outputs with a grammar in Lark's notation",
    "grammar": "give structured_outputs with a grammar in Lark's notation",
    "json_schema": "give response_format",
    "n_predict": "give max_tokens",
}


class StreamOptions(Shape):
    """Of a streamed answer; vLLM's continuous_usage_stats tells the usage with every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Structured):
    """What completions and chats have in common."""

    model: str | None = None
    n: Annotated[Small, Field(ge=1)] | None = None
    max_tokens: Small | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    min_tokens: Small | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Last | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_from_elsewhere(cls, given: Any) -> Any:
        return without(ELSEWHERE, given)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        return self


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None  # llama.cpp's
    best_of: int | None = None
    suffix: str | None = None


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Small | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None  # they are the template's to write

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs of a chat are only for stream=false")
        names = [tool.function.name for tool in self.tools or ()]
        if len(names) != len({*names}):
            raise ValueError("tools: two functions have one name; rename one")
        choice = self.tool_choice
        if choice is not None and choice not in ("none", "auto") and not names:
            raise ValueError("tool_choice asks for a tool and tools are missing")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError("tool_choice.function.name is not one of the tools")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self


class EmbeddingRequest(Shape):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    # ours
    pooling: Literal["mean", "last"] | None = None
    # vLLM's
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Last | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None


class TokenizeRequest(Shape):
    """POST /tokenize: of a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Shape):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], BeforeValidator(_counted)]


FIELDS = frozenset(field_names(Shape) | {*ELSEWHERE})  # of all requests and their parts
