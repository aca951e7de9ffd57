"""A chat as OpenAI's API shapes it: messages, calls of the past, and tools."""

from typing import Any, Literal

from pydantic import model_validator

from jaxdist.server.shape import Name, Shape

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
