"""A chat as OpenAI's API shapes it: messages, calls of the past, and tools."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxdist.server.shape import Name, Shape

MOST = 8192  # messages of a chat, the parts of their contents included
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class FunctionCall(Shape):
    """What the model called; arguments are JSON as text."""

    name: Name
    arguments: str


class ToolCall(Shape):
    """One call in an assistant's message of the past."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Shape):
    """A part of a message."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class Message(Shape):
    """One message of a chat."""

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by another name

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing in a message of the {self.role}")
        return self


def _bounded(given: Any) -> Any:
    """Checked before any of them is read, which would hold up other requests."""
    messages = given if isinstance(given, list) else []
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    count = len(messages) + sum(len(parts) for parts in contents if isinstance(parts, list))
    if count > MOST:
        raise ValueError(f"{count} messages and parts are too many; at most {MOST} are allowed")
    return given


Messages = Annotated[list[Message], BeforeValidator(_bounded), Field(min_length=1)]


class Function(Shape):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Shape):
    """A tool: always a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Shape):
    """Which function."""

    name: Name


class NamedTool(Shape):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName
