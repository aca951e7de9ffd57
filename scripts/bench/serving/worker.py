"""The worker's end: start the engine that the spec names, then generate on command.

Started as `python -m bench.serving.worker SPEC_JSON`; ends when its standard input does.
"""

import importlib
import json
import os
import sys
import time

from bench.serving.spec import Engine, EngineSpec


def main() -> None:
    """Serve turns until the parent hangs up."""
    # Libraries print; what they print must not get between the replies.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spec = EngineSpec.from_json(sys.argv[1])
    module = importlib.import_module(f"bench.serving.{spec.framework}_engine")
    engine: Engine = module.start(spec)
    print(json.dumps(engine.about), file=replies)
    for line in sys.stdin:
        asked = json.loads(line)
        before = engine.counters()
        start = time.perf_counter()
        tokens = engine.generate(asked["prompts"], asked["new_tokens"])
        reply = {
            "seconds": time.perf_counter() - start,
            "tokens": tokens,
            "counts": [len(ids) for ids in tokens],
            "counters": {name: now - before[name] for name, now in engine.counters().items()},
        }
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
