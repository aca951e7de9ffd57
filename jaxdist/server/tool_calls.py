"""Reading the calls of tools from a text that is still growing.

Arguments are given on as they come, exactly as the model wrote them, so that the pieces of a call
joined are its arguments whole. A text that is no sound call stays content.
"""

import json
import secrets
from dataclasses import dataclass, field

from jaxdist.server.tools import BEGIN, END, ToolUse


@dataclass
class CallDelta:
    """What is new of one call: with its first delta come id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Delta:
    """What is new of an answer: text that belongs to no call, and calls."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ObjectScanner:
    """Reads one JSON object character by character.

    Attributes:
        text: All that was read.
        name: Its member "name", once read.
        done: Whether its last brace was read.
        begun: Whether the call was announced.
    """

    def __init__(self):
        self.text, self.done, self.begun = "", False, False
        self.name: str | None = None
        self._depth, self._in_string, self._escaped = 0, False, False
        self._part: list[str] = []  # the key or value being read
        self._key: object = None
        self._in_value = False
        self._arguments = ""  # not yet given on

    def push(self, char: str) -> None:
        """One more character; none may follow the last brace."""
        self.text += char
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return self._keep(char)
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        if len(self.text.lstrip()) <= (char == "{"):  # before the first brace, or that one
            return None
        if self._depth == 1 and char == ":" and not self._in_value:
            self._key, self._part, self._in_value = _parsed(self._part), [], True
        elif self._depth == 0 or (self._depth == 1 and char == ","):
            if self._in_value and self._key == "name":
                name = _parsed(self._part)
                self.name = name if isinstance(name, str) else None
            self._part, self._in_value = [], False
            self.done = self._depth == 0
        else:
            self._keep(char)

    def new_arguments(self) -> str:
        """More of the text of "arguments"; nothing before the name is known."""
        if self.name is None:
            return ""
        piece, self._arguments = self._arguments, ""
        return piece

    def _keep(self, char: str) -> None:
        if self._in_value and self._key in ("arguments", "parameters"):
            self._arguments += char if self._arguments or self._part else char.strip()
        self._part.append(char)


class ToolParser:
    """Splits the text of one answer into content and calls, as `use` says they are written."""

    def __init__(self, use: ToolUse):
        self._kind, self._name, self._several = use.kind, use.name, use.several
        self._held = ""  # may be white space before a call, or the start of BEGIN
        self._scanner: ObjectScanner | None = None
        self._closing = False  # after a call, up to its END
        self.num_calls = 0  # begun

    def push(self, piece: str) -> Delta:
        """What `piece` adds."""
        delta = Delta()
        if self._kind is None:
            delta.content = piece
        elif self._kind == "named":
            if not self.num_calls:
                self._begin(delta, self._name or "")
            delta.calls.append(CallDelta(self.num_calls - 1, arguments=piece))
        else:
            for char in piece:
                self._read(char, delta)
            if self._scanner is not None:
                self._give_arguments(delta)
        return self._merged(delta)

    def finish(self) -> Delta:
        """What waited: it was no call."""
        delta = Delta()
        if self._scanner is not None and self._scanner.name is None:
            opening = BEGIN if self._kind == "auto" else ""
            delta.content = opening + self._scanner.text
        elif self._scanner is None and not (self.num_calls and not self._held.strip()):
            delta.content = "" if self._closing else self._held
        self._held, self._scanner = "", None
        return delta

    def _read(self, char: str, delta: Delta) -> None:
        if self._scanner is not None:
            self._in_call(char, delta)
        elif self._kind == "required":
            if char == "{":
                self._scanner = ObjectScanner()
                self._in_call(char, delta)
        elif self._closing:
            self._held += char
            self._closing = END.startswith(self._held.lstrip()) and self._held.lstrip() != END
            if not self._closing and self._held.lstrip() == END:
                self._held = ""
        else:
            self._in_content(char, delta)

    def _in_content(self, char: str, delta: Delta) -> None:
        self._held += char
        waiting = self._held.lstrip()
        if waiting == BEGIN:
            self._held, self._scanner = "", ObjectScanner()
        elif waiting and not BEGIN.startswith(waiting):
            # What is left may begin anew inside of what waited.
            keep = next(i for i in range(1, len(self._held) + 1) if _may_begin(self._held[i:]))
            delta.content += self._held[:keep]
            self._held = self._held[keep:]

    def _in_call(self, char: str, delta: Delta) -> None:
        scanner = self._scanner
        assert scanner is not None
        scanner.push(char)
        opened = scanner.text.lstrip()
        if opened and opened[0] != "{":  # no object at all
            delta.content += BEGIN + scanner.text
            self._scanner = None
        elif scanner.done:
            if scanner.name is None:
                delta.content += (BEGIN if self._kind == "auto" else "") + scanner.text
            else:
                self._give_arguments(delta)
                self._closing = self._kind == "auto"
            self._scanner = None

    def _give_arguments(self, delta: Delta) -> None:
        scanner = self._scanner
        assert scanner is not None
        if scanner.name is None:
            return
        if not scanner.begun:
            self._begin(delta, scanner.name)
            scanner.begun = True
        piece = scanner.new_arguments()
        if piece:
            delta.calls.append(CallDelta(self.num_calls - 1, arguments=piece))

    def _begin(self, delta: Delta, name: str) -> None:
        delta.calls.append(CallDelta(self.num_calls, f"call_{secrets.token_hex(12)}", name))
        self.num_calls += 1

    def _merged(self, delta: Delta) -> Delta:
        """One delta a call; of calls that were not to be several the first."""
        calls: dict[int, CallDelta] = {}
        for call in delta.calls:
            first = calls.setdefault(call.index, call)
            if first is not call:
                first.arguments += call.arguments
        kept = [call for call in calls.values() if self._several or not call.index]
        return Delta(delta.content, kept)


def _may_begin(text: str) -> bool:
    return BEGIN.startswith(text.lstrip()) if text.strip() else True


def _parsed(chars: list[str]) -> object:
    try:
        return json.loads("".join(chars))
    except ValueError:
        return None
