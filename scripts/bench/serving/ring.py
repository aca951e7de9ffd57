"""Where serving contenders meet: they take turns in a circle on the same prompts."""

import zlib
from collections.abc import Sequence
from pathlib import Path

from bench.child import ContenderFailed
from bench.serving.arrivals import Texts
from bench.serving.contenders import Contender, start
from bench.serving.plan import Entry, Race
from bench.serving.report import Outcome
from bench.serving.spec import OWN_TOKENS, EngineSpec, Reply, Task

WARM_UP = -1  # the round that does not count; a shared beginning is cached in one before it
FIRST = -2
LEAST_AGREEMENT = 0.5  # of first tokens: roundings differ, models must not


class Ring:
    """Runs races; a contender that the next one shares stays, the others leave.

    about: What each contender that came up said of itself, by its title.
    """

    def __init__(self, texts: Texts, cache: Path | None = None):
        """cache: Folder of jaxdist's compiled programs; None takes its own."""
        self._texts, self._cache = texts, cache
        self._contenders: dict[EngineSpec, Contender] = {}
        self._failures: dict[EngineSpec, str] = {}
        self.about: dict[str, dict] = {}

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for spec in list(self._contenders):
            self._dismiss(spec, patience=0 if error else 10)

    def race(self, race: Race, rounds: int) -> list[Outcome]:
        """One outcome for each of the others."""
        entries = (race.ours, *race.others)
        wanted = {entry.spec for entry in entries}
        for spec in [spec for spec in self._contenders if spec not in wanted]:
            self._dismiss(spec)
        replies: dict[Entry, list[Reply]] = {entry: [] for entry in entries}
        for number in range(FIRST, rounds):
            for entry in entries:
                takes_part = number > FIRST or entry.task.shared
                if takes_part and entry.spec not in self._failures:
                    self._turn(race.name, entry, number, replies[entry])
        return [self._outcome(race, other, replies) for other in race.others]

    def _turn(self, name: str, entry: Entry, number: int, replies: list[Reply]) -> None:
        """One turn, kept where it counts; a contender that fails is out of this and later races."""
        spec = entry.spec
        try:
            if spec not in self._contenders:
                self._contenders[spec] = start(spec, self._cache)
                self.about[spec.title] = self._contenders[spec].about
            given = prompts(self._texts, name, entry.task, number)
            reply = self._contenders[spec].turn(given, entry.task.new_tokens)
        except ContenderFailed as failure:
            self._failures[spec] = f"{spec.title}: {failure}"
            self._dismiss(spec, patience=0)
            return
        if number > WARM_UP:
            replies.append(reply)

    def _outcome(self, race: Race, other: Entry, replies: dict[Entry, list[Reply]]) -> Outcome:
        ours, theirs = replies[race.ours], replies[other]
        failed = [self._failures[e.spec] for e in (race.ours, other) if e.spec in self._failures]
        pairs = list(zip(ours, theirs, strict=False))
        problem = failed[0] if failed else mismatch(race.ours.task, other.task, pairs)
        return Outcome(race=race, other=other, pairs=pairs, problem=problem)

    def _dismiss(self, spec: EngineSpec, patience: float = 10) -> None:
        contender = self._contenders.pop(spec, None)
        if contender is not None:
            contender.close(patience)


def prompts(texts: Texts, race: str, task: Task, number: int) -> list[list[int]]:
    """Those of a turn: the same for all that have this task, others in each round."""
    seed = (zlib.crc32(race.encode()), number - FIRST)
    if not task.shared:
        return texts.prompts(task.batch, task.prompt_tokens, seed)
    [head] = texts.prompts(1, task.prompt_tokens - OWN_TOKENS, (seed[0], 0, 1))
    return [head + tail for tail in texts.prompts(task.batch, OWN_TOKENS, (*seed, 2))]


def mismatch(task: Task, other_task: Task, pairs: Sequence[tuple[Reply, Reply]]) -> str:
    """Why the two did not do the same work; empty where they did."""
    same, compared = 0, 0
    for ours, theirs in pairs:
        for one, asked in ((ours, task), (theirs, other_task)):
            if list(one.counts) != [asked.new_tokens] * asked.batch:
                return f"{sorted(set(one.counts))} tokens in place of {asked.new_tokens}"
        for one in (ours, theirs):
            if compiled := one.counters.get("compilations"):
                return f"{compiled:.0f} compilations in a turn that counts"
        if task == other_task and ours.tokens and theirs.tokens:
            heads = [(a[0], b[0]) for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
            same += sum(a == b for a, b in heads)
            compared += len(heads)
    if same < LEAST_AGREEMENT * compared:
        return f"only {same} of {compared} first tokens are the same"
    return ""
