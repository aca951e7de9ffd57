"""What a model thinks before it answers, which it writes between `<think>` and `</think>`."""

from jaxdist.inference.guidance.thoughts import BEGIN, END, Opening

CHOICES = ("none", "deepseek_r1", "qwen3")  # by vLLM's names


def opening(kind: str, prompt_end: str) -> Opening:
    """Where an answer begins.

    A template may open thoughts at the prompt's end, or show by an empty pair that there are none.
    DeepSeek's R1 thinks in any case, and may leave the opening out.

    kind: One of CHOICES but none. prompt_end: The prompt's last characters, special tokens written
    out.
    """
    end = prompt_end.rstrip()
    if end.endswith(END):
        return Opening.AFTER
    thinks = kind == "deepseek_r1" or end.endswith(BEGIN)
    return Opening.INSIDE if thinks else Opening.BEFORE


class ReasoningParser:
    """Splits a growing text into thoughts and the answer; marks that stand elsewhere are text.

    The thoughts of an answer that is cut before their end are no answer.
    """

    def __init__(self, begins: Opening):
        self._inside, self._begun = begins is Opening.INSIDE, begins is Opening.AFTER
        self._held = ""  # white space and what may become a mark

    def push(self, piece: str) -> tuple[str, str]:
        """(thoughts, answer) that `piece` adds."""
        if self._begun and not self._inside:
            return "", piece
        text, self._held = self._held + piece, ""
        if not self._begun:
            start = text.lstrip()
            if BEGIN.startswith(start) and start != BEGIN:
                self._held = text
                return "", ""
            self._begun = True
            if not start.startswith(BEGIN):
                return self.push(text)
            self._inside, text = True, start.removeprefix(BEGIN)
        thoughts, end, answer = text.partition(END)
        if end:
            self._inside = False
            return thoughts, answer
        keep = next(i for i in range(len(END) - 1, -1, -1) if text.endswith(END[:i]))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def finish(self) -> tuple[str, str]:
        """What waited: it was no mark."""
        held, self._held = self._held, ""
        return (held, "") if self._inside else ("", held)
