"""Answers as OpenAI's API shapes them. A field that was not set is not sent."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """What all answers and their parts have in common."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    def json_bytes(self) -> bytes:
        """As it is sent."""
        return self.model_dump_json(exclude_unset=True).encode()


class ErrorDetail(Answer):
    """What is wrong, which field, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Any request that is refused."""

    error: ErrorDetail


class PromptDetails(Answer):
    """Of a prompt's tokens."""

    cached_tokens: int


class Usage(Answer):
    """Tokens: a prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class CompletionLogprobs(Answer):
    """One entry a token in each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Answer):
    """One continuation, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Answer):
    """The answer of /v1/completions; streamed, each event is one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Answer):
    """A candidate."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The chosen token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """One entry a token."""

    content: list[TokenLogprob] | None
    refusal: None = None


class CalledFunction(Answer):
    """Its name, and its arguments as JSON; streamed, the pieces joined are."""

    name: str | None = None
    arguments: str


class Call(Answer):
    """A call of a tool."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AnswerMessage(Answer):
    """What the model said; what it thought has vLLM's name of old and of today."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChunkChoice(Answer):
    """A piece of one answer."""

    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Answer):
    """An event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class Embedding(Answer):
    """A vector of length 1: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Usage


class Model(Answer):
    """A name under which the model is served; the sampling that it has of its own."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    default_sampling_params: dict[str, float] = {}


class Models(Answer):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Version(Answer):
    """The answer of /version."""

    version: str


class Tokens(Answer):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Answer):
    """The answer of /detokenize."""

    prompt: str
