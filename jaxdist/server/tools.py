"""Tools: how a model is told of them and made to call them; `dialects/` says how calls are written.

Models whose templates know of no tools are told of them in words, and to call as Hermes' models do.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from jaxdist.config import UsageError
from jaxdist.inference.sampling.sampling_params import StructuredOutputsParams
from jaxdist.server.dialects.between_marks import BEGIN, END
from jaxdist.server.dialects.call_object import schema_of_calls
from jaxdist.server.dialects.dialect import Dialect
from jaxdist.server.dialects.hermes import Hermes
from jaxdist.server.errors import APIError
from jaxdist.server.messages import NamedTool, Tool
from jaxdist.server.protocol import ChatRequest

_ABOUT = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call write a JSON object with the function's name and arguments within \
<tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def describe_tools(messages: list[dict[str, Any]], tools: list[Any]) -> list[dict[str, Any]]:
    """The messages with the tools in the system's message, and calls and results as text.

    For templates that know of no tools.
    """
    about = _ABOUT.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in tools))
    told = [_in_words(message) for message in messages]
    if told[0]["role"] in ("system", "developer"):
        first = {**told[0], "content": f"{told[0]['content']}\n\n{about}"}
        return [first, *told[1:]]
    return [{"role": "system", "content": about}, *told]


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    message = dict(message)
    calls = message.pop("tool_calls", [])
    texts = [message["content"]] if message["content"] else []
    texts += [
        f"{BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}" for call in calls
    ]
    message["content"] = "\n".join(texts)
    if message["role"] in ("tool", "function"):
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        message = {"role": "user", "content": content}
    return message


class ToolUse:
    """What a request wants of its tools.

    Attributes:
        kind: None where none is to be called, else "auto", "required" or "named".
        name: Of the function, where it is named.
        told: The tools that the model is told of.
        several: Whether an answer may hold more than one call.
        dialect: Of the calls where the model may choose; None where they stay text.
    """

    def __init__(self, request: ChatRequest, dialect: type[Dialect] | None = Hermes):
        self.dialect = dialect
        choice, tools = request.tool_choice, request.tools or []
        self.kind: str | None = None
        self.name: str | None = None
        self.told: Sequence[Tool] = [] if choice == "none" else tools
        self.several = request.parallel_tool_calls is not False
        if isinstance(choice, NamedTool):
            self.kind, self.name = "named", choice.function.name
        elif choice == "required":
            self.kind = "required"
        elif self.told:
            self.kind = "auto"

    def structure(self) -> StructuredOutputsParams | None:
        """What the text must conform to so that it is a call; None where it is free.

        Where the model may choose, only the calls of a strict tool are held to its parameters, and
        only calls of tools that exist can be written. APIError where the dialect cannot say that.
        """
        if self.kind == "named":
            (tool,) = (tool for tool in self.told if tool.function.name == self.name)
            return StructuredOutputsParams(json=_parameters(tool))
        if self.kind == "required":
            calls = schema_of_calls(self.parameters)
            most = {} if self.several else {"maxItems": 1}
            return StructuredOutputsParams(
                json={"type": "array", "minItems": 1, "items": calls, **most}
            )
        strict = {tool.function.name for tool in self.told if tool.function.strict}
        if self.kind != "auto" or self.dialect is None or not strict:
            return None
        held = {name: given if name in strict else None for name, given in self.parameters.items()}
        try:
            grammar = self.dialect.grammar(held, self.several)
        except UsageError as error:
            raise APIError(str(error), param="tools") from None
        return StructuredOutputsParams(grammar=grammar)

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of each tool's, by its name."""
        return {tool.function.name: _parameters(tool) for tool in self.told}

    @property
    def marks(self) -> Sequence[str]:
        """Texts that mark calls and must be seen, though they may be special tokens."""
        return self.dialect.MARKS if self.dialect is not None and self.kind == "auto" else ()

    @property
    def finish_reason(self) -> Literal["stop", "tool_calls"]:
        """Of an answer that ends with calls: OpenAI says "stop" where the function was named."""
        return "stop" if self.kind == "named" else "tool_calls"


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}
