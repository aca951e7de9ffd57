"""Texts that end an output, found wherever tokens and pieces split them."""

from collections.abc import Sequence


class StopStrings:
    """Scans a text that comes in pieces; what may become a stop text waits.

    Of several stop texts the one that is complete first counts; of those the one that began first.
    The outcome is the same for every way to cut the text into pieces.

    include: Keep the stop text itself in what is given.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops = [stop for stop in stops if stop]
        self._begins = tuple({stop[:n] for stop in self._stops for n in range(1, len(stop))})
        self._include = include
        self._waiting = ""

    def push(self, piece: str, *, active: bool = True) -> tuple[str, str | None]:
        """(text that is certain now, the stop text that ended it or None).

        active: False while the output may not end yet; a stop text complete in this piece is then
        like any other text.
        """
        if not self._stops:
            return piece, None
        if not piece:
            return "", None
        old, text = len(self._waiting), self._waiting + piece
        if active:
            found = self._first(text, old)
            if found is not None:
                start, stop = found
                self._waiting = ""
                return text[: start + len(stop) if self._include else start], stop
        keep = len(text) - self._unfinished(text)
        self._waiting = text[keep:]
        return text[:keep], None

    def finish(self) -> str:
        """What waited and did not become a stop text."""
        rest, self._waiting = self._waiting, ""
        return rest

    def _first(self, text: str, old: int) -> tuple[int, str] | None:
        """The match that is complete first; complete ones within `old` characters are past."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = start + len(stop), start, stop
        return None if best is None else best[1:]

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop text."""
        longest = 0
        if not text.endswith(self._begins):  # as for most tokens
            return 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
