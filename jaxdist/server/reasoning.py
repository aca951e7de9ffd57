"""What a model thinks before it answers, which it writes between `<think>` and `</think>`."""

BEGIN, END = "<think>", "</think>"
CHOICES = ("none", "deepseek_r1", "qwen3")  # by vLLM's names


def begins_inside(kind: str, prompt_end: str) -> bool:
    """Whether an answer begins inside of thoughts.

    A template may open them at the prompt's end, or show by an empty pair that there are none.
    DeepSeek's R1 thinks in any case, and may leave the opening out.

    kind: One of CHOICES. prompt_end: The prompt's last characters, special tokens written out.
    """
    end = prompt_end.rstrip()
    return end.endswith(BEGIN) or (kind == "deepseek_r1" and not end.endswith(END))


class ReasoningParser:
    """Splits a growing text into thoughts and the answer; marks that stand elsewhere are text.

    The thoughts of an answer that is cut before their end are no answer.
    """

    def __init__(self, inside: bool):
        """inside: Whether the text begins in thoughts, even where nothing opens them."""
        self._inside, self._begun = inside, False
        self._held = ""  # white space and what may become a mark

    def push(self, piece: str) -> tuple[str, str]:
        """(thoughts, answer) that `piece` adds."""
        if self._begun and not self._inside:
            return "", piece
        text, self._held = self._held + piece, ""
        if not self._begun:
            opening = text.lstrip()
            if BEGIN.startswith(opening) and opening != BEGIN:
                self._held = text
                return "", ""
            self._begun = True
            if not opening.startswith(BEGIN):
                return self.push(text)
            self._inside, text = True, opening.removeprefix(BEGIN)
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
