"""From a chat to the ids of its prompt, by the model's own template."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from jaxdist.config.json_text import read_object
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.data.tokenizer_files import chat_template
from jaxdist.server.aside import aside
from jaxdist.server.errors import APIError
from jaxdist.server.messages import Message, Tool
from jaxdist.server.special_tokens import Disguise, SpecialTokens
from jaxdist.server.template_process import TemplateProcess
from jaxdist.server.tools import describe_tools

# For models that have none: what a model that never saw a chat continues best.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: "
    "{{ message.content }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOP = "\n\nUser:"  # such a model would go on with the next question
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_OURS = {"messages", "tools", "documents", "add_generation_prompt", *_NAMED}


class Chat:
    """Renders chats for one model.

    Attributes:
        tokens: Special tokens of the vocabulary.
        template: The text of the one that renders.
        has_template: Whether the model brought it.
        stops: Texts that end an answer besides the request's own.
    """

    def __init__(
        self, tokenizer: Tokenizer, files: Mapping[str, bytes], *, template: str | None = None
    ):
        """files: The model's small files, by name, as `ModelSource.companions` gives them.
        template: In place of theirs."""
        self.tokens = SpecialTokens(tokenizer)
        template = template or chat_template(dict(files))
        self.has_template = template is not None
        self.stops = () if self.has_template else (PLAIN_STOP,)
        self.template = template or PLAIN_TEMPLATE
        self._process = TemplateProcess(self.template)
        self._named = _named_tokens(files, tokenizer, self.tokens)

    async def start(self) -> None:
        """Compile the template, in a process of its own."""
        await self._process.start()

    async def close(self) -> None:
        """End that process."""
        await self._process.close()

    @property
    def tells_tools(self) -> bool:
        """Whether the template, once compiled, shows a model its tools."""
        return "tools" in self._process.uses

    def is_special(self, text: str) -> bool:
        """Whether `text` is a special token."""
        return text in self.tokens.ids

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of the prompt. Special tokens come from the template only, bos included.

        extra: Further variables of the template, such as enable_thinking. documents: What an answer
        may draw on, where the template shows it.
        """
        told = await aside(10 * len(messages), list, map(_plain, messages))
        schemas = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        if schemas and not self.tells_tools:
            told, schemas = describe_tools(told, schemas), []
        if unknown := _OURS & {*(extra or ())}:
            raise APIError(
                f"chat_template_kwargs must not set {min(unknown)}", param="chat_template_kwargs"
            )
        if documents and "documents" not in self._process.uses:
            raise APIError(
                "the model's chat template shows no documents; write them into a message",
                param="documents",
            )
        given = [told, schemas, list(documents or ()), dict(extra or {})]
        size = sum(map(len, _texts(given)))
        disguise, variables = await aside(size, self._disguised, *given)
        text = await self._process.render(
            {
                **variables,
                **self._named,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            }
        )
        if continue_final_message:
            text = _up_to(text, variables["messages"][-1]["content"].strip())
        return await aside(len(text), self.tokens.encode, text, disguise)

    def _disguised(
        self, messages: list[Any], tools: list[Any], documents: list[Any], extra: dict[str, Any]
    ) -> tuple[Disguise, dict[str, Any]]:
        """The template's variables, no special token being spelled in their texts."""
        disguise = Disguise(self.tokens, _texts([messages, tools, documents, extra]))
        return disguise, {
            **_hide(extra, disguise),
            "messages": [_hide_message(message, disguise) for message in messages],
            "tools": _hide(tools, disguise) or None,
            "documents": _hide(documents, disguise) or None,
        }


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content is one text, arguments are objects."""
    told = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        told["content"] = "\n".join(part.text or part.refusal or "" for part in message.content)
    told.setdefault("content", "")
    if "reasoning" in told:
        told.setdefault("reasoning_content", told["reasoning"])
    for call in told.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = from_json(call["function"]["arguments"])
        except ValueError:  # also where it is nested more than 200 deep
            continue  # the model's own mistake: templates show it as text
    return told


def _up_to(text: str, content: str) -> str:
    at = text.rfind(content)
    if not content or at < 0:
        raise APIError(
            "continue_final_message: the last message has no content that the template shows",
            param="continue_final_message",
        )
    return text[: at + len(content)]


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _texts(inner)


def _hide_message(message: dict[str, Any], disguise: Disguise) -> dict[str, Any]:
    """As `_hide`; the role is one of ours, and templates make special tokens of it."""
    return {**_hide(message, disguise), "role": message["role"]}


def _hide(value: Any, disguise: Disguise, key: str = "") -> Any:
    """The value with special tokens disguised in all its texts."""
    if isinstance(value, str):
        return disguise.hide(value, whole=key in ("content", "name"))
    if isinstance(value, dict):
        return {disguise.hide(k): _hide(inner, disguise, k) for k, inner in value.items()}
    if isinstance(value, list):
        return [_hide(inner, disguise) for inner in value]
    return value


def _named_tokens(
    files: Mapping[str, bytes], tokenizer: Tokenizer, tokens: SpecialTokens
) -> dict[str, str]:
    """The texts of bos, eos and such, by the names that templates use."""
    text_of = {i: text for text, i in tokens.ids.items()}
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    named = {name: "" if i is None else text_of.get(i, "") for name, i in ids.items()}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        settings = read_object(files.get(file, b"{}"), f"{file} of the model")
        for name in _NAMED:
            token = settings.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                named[name] = text
    return named
