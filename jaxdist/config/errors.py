"""User errors: one line on stderr with the rule, the value and the fix, and exit code 2."""

import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXIT_CODE = 2
CTRL_C_EXIT_CODE = 130  # 128 + SIGINT, as shells report it
TRACEBACK = "JAXDIST_TRACEBACK"


class UsageError(ValueError):
    """What the user asked for cannot work; the message names the rule, the value and the fix."""


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates that `word` may be a misspelling of, best first; empty where none is near.

    A dotted candidate is also compared by its last part, so that `lerning_rate` finds
    `optimizer.learning_rate`.
    """

    def score(candidate: str) -> float:
        bare = candidate.lstrip("-")
        whole = difflib.SequenceMatcher(None, wanted, bare).ratio()
        last = difflib.SequenceMatcher(
            None, wanted.rsplit(".", 1)[-1], bare.rsplit(".", 1)[-1]
        ).ratio()
        return max(whole, last - 0.01)  # at a tie the section that was written wins

    wanted = word.lstrip("-")
    scored = sorted(((score(c), c) for c in candidates), key=lambda pair: (-pair[0], pair[1]))
    floor = max(0.6, scored[0][0] - 0.1) if scored else 0
    return [candidate for value, candidate in scored[:count] if value >= floor]


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean a, b?` or, where nothing is near, an empty string."""
    close = nearest(word, candidates)
    return f"; did you mean {' or '.join(close)}?" if close else ""


@contextmanager
def one_line_errors(prog: str = "jaxdist") -> Iterator[None]:
    """Turn a ValueError or OSError inside into one line on stderr and exit code 2.

    Ctrl-C ends with its exit code and no traceback. With JAXDIST_TRACEBACK=1 in the environment
    errors pass through unchanged.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get(TRACEBACK, "") not in ("", "0"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        # What we refuse says all there is to say; of others the place may be wanted.
        hint = "" if isinstance(error, (UsageError, OSError)) else f" ({TRACEBACK}=1 shows where)"
        print(f"{prog}: error: {message}{hint}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None
    except KeyboardInterrupt:
        raise SystemExit(CTRL_C_EXIT_CODE) from None
