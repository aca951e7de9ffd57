"""From the text of an answer that grows to its thoughts, its content and its calls of tools."""

from jaxdist.inference.outputs import CompletionOutput
from jaxdist.server.dialects.dialect import Delta
from jaxdist.server.reasoning import ReasoningParser
from jaxdist.server.tool_calls import ToolParser
from jaxdist.server.tools import ToolUse


class AnswerReader:
    """What the client knows of one answer, and what is new of it.

    Attributes:
        parser: Of its calls.
        begun, ended: Whether any, or all of it, was taken.
        num_tokens: Tokens that were taken.
    """

    def __init__(self, use: ToolUse, thoughts: ReasoningParser):
        self.parser, self._thoughts = ToolParser(use), thoughts
        self.begun = self.ended = False
        self.num_tokens = self._num_chars = 0

    def take(self, now: CompletionOutput) -> Delta:
        """What is new."""
        self.ended = now.finish_reason is not None
        reasoning, text = self._split(now.text[self._num_chars :])
        delta = self.parser.push(text)
        delta.reasoning = reasoning
        self._num_chars, self.num_tokens = len(now.text), len(now.token_ids)
        self.begun = True
        if self.ended:
            delta.content += self.parser.finish().content
        return delta

    def _split(self, piece: str) -> tuple[str, str]:
        """Thoughts and the answer."""
        reasoning, text = self._thoughts.push(piece)
        if self.ended:
            more, rest = self._thoughts.finish()
            return reasoning + more, text + rest
        return reasoning, text
