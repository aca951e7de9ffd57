"""Reading the calls of tools from a text that is still growing."""

from jaxdist.server.dialects.call_object import CallObject
from jaxdist.server.dialects.dialect import Delta, Found
from jaxdist.server.dialects.hermes import Hermes
from jaxdist.server.tools import ToolUse


class ToolParser:
    """Splits the text of one answer into content and calls, as `use` says they are written."""

    def __init__(self, use: ToolUse):
        self._use = use
        self._found = Found()
        dialect = use.dialect or Hermes  # its ids are those of all calls
        self._dialect = dialect(self._found, use.parameters)
        self._call: CallObject | None = None  # of an array of calls

    @property
    def num_calls(self) -> int:
        """Calls that were begun."""
        return self._found.num_calls

    def push(self, piece: str) -> Delta:
        """What `piece` adds."""
        use, found = self._use, self._found
        if use.kind == "named":
            if not found.num_calls:
                found.begin(use.name or "", self._dialect.new_id())
            found.arguments(piece)
        elif use.kind == "required":
            for char in piece:
                self._in_array(char)
        elif use.kind == "auto" and use.dialect is not None:
            for char in piece:
                self._dialect.read(char)
        else:
            found.content(piece)
        return self._taken()

    def finish(self) -> Delta:
        """What waited: it was no call."""
        if self._call is not None:
            self._call.finish()
        else:
            self._dialect.finish()
        return self._taken()

    def _in_array(self, char: str) -> None:
        """What stands between the calls that must be made is nothing."""
        if self._call is None and char == "{":
            self._call = CallObject(self._found, self._dialect, "", strict=False)
        if self._call is not None and self._call.push(char) is not None:
            self._call = None

    def _taken(self) -> Delta:
        """What is new; of calls that were not to be several the first."""
        delta = self._found.take()
        if not self._use.several:
            delta.calls = [call for call in delta.calls if not call.index]
        return delta
