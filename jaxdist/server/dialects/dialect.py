"""What the dialects have in common in which models write calls of tools.

An answer is read character by character, so that what is told of it does not depend on how it was
split. Arguments are told as they come, those in JSON exactly as the model wrote them: the pieces of
a call joined are its arguments whole. A text that is no sound call stays content.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass
class CallDelta:
    """What is new of one call: with its first delta come id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Delta:
    """What is new of an answer: text that belongs to no call, calls, and thoughts before both."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class Found:
    """What was found in an answer: one delta for each call, and content, until they are taken.

    Attributes:
        num_calls: Calls that were begun.
    """

    def __init__(self):
        self.num_calls = 0
        self._delta = Delta()

    def content(self, text: str) -> None:
        """Text that belongs to no call."""
        self._delta.content += text

    def begin(self, name: str, id_: str) -> None:
        """A further call."""
        self._delta.calls.append(CallDelta(self.num_calls, id_, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the last call's."""
        if text and not self._delta.calls:
            self._delta.calls.append(CallDelta(self.num_calls - 1))
        if text:
            self._delta.calls[-1].arguments += text

    def take(self) -> Delta:
        """What is new."""
        delta, self._delta = self._delta, Delta()
        return delta


class Dialect(ABC):
    """Reads one answer, in which calls may stand, into `found`."""

    MARKS: ClassVar[tuple[str, ...]] = ()  # texts that may be special tokens and must be seen

    def __init__(self, found: Found, tools: Mapping[str, Any]):
        """tools: The schema of each one's parameters, by its name."""
        self._found, self._tools = found, tools

    @abstractmethod
    def read(self, char: str) -> None:
        """One more character."""

    @abstractmethod
    def finish(self) -> None:
        """The answer has ended: what waited was no call."""

    @staticmethod
    def new_id() -> str:
        """A call's id, as the dialect's templates take it."""
        return f"call_{secrets.token_hex(12)}"

    @staticmethod
    @abstractmethod
    def grammar(tools: Mapping[str, Any], several: bool) -> str:
        """A grammar (Lark, as llguidance reads it) of free text that may end with calls.

        tools: What a call's parameters are held to, by its name; None: to nothing. Raises
            UsageError where that cannot be said.
        """

    def _leave(self, waiting: str) -> None:
        """`waiting` is content; white space after calls is nothing."""
        if waiting.strip() or not self._found.num_calls:
            self._found.content(waiting)


class Until:
    """Text up to a mark. White space before the mark waits with it, for it is no content.

    Attributes:
        complete: Whether a mark was read.
    """

    def __init__(self, *marks: str):
        """marks: None of them begins another."""
        self._marks, self._held, self.complete = marks, "", False

    def push(self, char: str) -> str:
        """The text that is certain not to belong to a mark."""
        self._held += char
        self.complete = self._held.lstrip() in self._marks
        if self._may_be_mark(self._held):
            return ""
        # What is left may begin anew inside of what waited.
        held = self._held
        keep = next(i for i in range(1, len(held) + 1) if self._may_be_mark(held[i:]))
        self._held = held[keep:]
        return held[:keep]

    def take(self) -> str:
        """What waits."""
        held, self._held, self.complete = self._held, "", False
        return held

    def _may_be_mark(self, text: str) -> bool:
        return any(mark.startswith(text.lstrip()) for mark in self._marks)
