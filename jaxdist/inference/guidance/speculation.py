"""Guesses at the next tokens from what the text repeats (prompt lookup): exact, since checked.

What follows the newest earlier place where the last tokens stood is guessed to follow again.
"""

from collections.abc import Sequence


class NgramIndex:
    """Where each short run of tokens was last followed by something.

    shortest, longest: Lengths of the runs; the longest that is found counts.
    """

    def __init__(self, shortest: int, longest: int):
        self._lengths = range(longest, shortest - 1, -1)
        self._followed_at: dict[tuple[int, ...], int] = {}
        self._num_seen = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that may follow `tokens`, which only ever grow from call to call.

        The work is in the number of tokens that are new.
        """
        self._take_in(tokens)
        if count <= 0:
            return []
        for length in self._lengths:
            start = self._followed_at.get(tuple(tokens[-length:]))
            if start is not None and len(tokens) >= length:
                period = len(tokens) - start  # where the place overlaps the end, it repeats itself
                return [tokens[start + i % period] for i in range(count)]
        return []

    def _take_in(self, tokens: Sequence[int]) -> None:
        """Note what each run before the newest token was followed by."""
        for end in range(max(self._num_seen, 1), len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._followed_at[tuple(tokens[end - length : end])] = end
        self._num_seen = max(self._num_seen, len(tokens))
