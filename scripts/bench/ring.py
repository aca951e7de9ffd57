"""Where contenders meet: two at a time, in turns, and only if they train the same model."""

import math

from bench.contender import Contender, ContenderFailed
from bench.plan import Comparison
from bench.report import Result
from bench.spec import Spec

NUM_WARMUP_STEPS = 3
# A fresh model's loss is ln V and a little: half the variance of its logits.
START_BELOW, START_ABOVE = 0.05, 0.4


class Ring:
    """Runs comparisons; a contender that the next one shares stays, the others leave."""

    def __init__(self):
        self._contenders: dict[Spec, Contender] = {}

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for contender in self._contenders.values():
            contender.close(patience=0 if error else 10)

    def meet(self, comparison: Comparison, rounds: int) -> Result:
        """Warm up, then let the two sides take turns, `rounds` times each."""
        sides = (comparison.subject, comparison.reference)
        seconds: list[tuple[float, float]] = []
        try:
            self._admit(*sides)
            ours, theirs = (self._contenders[spec] for spec in sides)
            for side in (ours, theirs):
                side.turn(1 if side.spec.job == "compile" else NUM_WARMUP_STEPS)
            for _ in range(rounds):
                seconds.append((ours.turn(comparison.steps), theirs.turn(comparison.steps)))
        except ContenderFailed as failure:
            self._admit()
            return Result(comparison=comparison, problem=str(failure))
        return Result(comparison=comparison, seconds=seconds, problem=mismatch(ours, theirs))

    def _admit(self, *specs: Spec) -> None:
        """Send away whoever is not in `specs`, then bring in those who are not here yet."""
        for spec in [spec for spec in self._contenders if spec not in specs]:
            self._contenders.pop(spec).close()
        for spec in specs:
            if spec not in self._contenders:
                self._contenders[spec] = Contender(spec)


def mismatch(ours: Contender, theirs: Contender) -> str:
    """Why the two did not train the same model on the same data; empty where they did."""
    sizes = [side.about["num_parameters"] for side in (ours, theirs)]
    if sizes[0] != sizes[1]:
        return f"{sizes[0]:,} parameters against {sizes[1]:,}"
    start = math.log(ours.spec.shape.vocab_size)
    for side in (ours, theirs):
        if not side.losses:
            continue  # it compiles only
        first, last = side.losses[0], side.losses[-1]
        if not start - START_BELOW < first < start + START_ABOVE:
            return f"{side.spec.title}: first loss {first:.3f} is not ln V = {start:.3f}"
        if not last < first:
            return f"{side.spec.title}: the loss did not fall ({first:.3f} -> {last:.3f})"
    return ""
