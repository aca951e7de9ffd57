"""The worker's end: build what the spec says, then run steps on command.

Started as `python -m bench.worker SPEC_JSON`; ends when its standard input does.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable

from bench.spec import Spec

Run = Callable[[int], list[float]]  # number of steps -> the loss of each


def main() -> None:
    """Serve turns until the parent hangs up."""
    # Libraries print; what they print must not get between the replies.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spec = Spec.from_json(sys.argv[1])
    kind = "torch" if spec.framework == "deepspeed" else spec.framework
    run, about = importlib.import_module(f"bench.{kind}_worker").start(spec)
    print(json.dumps(about), file=replies)
    for line in sys.stdin:
        start = time.perf_counter()
        losses = run(int(line))
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "losses": losses}), file=replies)


if __name__ == "__main__":
    main()
