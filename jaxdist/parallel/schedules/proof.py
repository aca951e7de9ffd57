"""The proof that a schedule's tables can run: every entry once, and none before what it needs.

An entry is microbatch * num_chunks + chunk; chunk v of stage s is the v*S+s-th stretch of layers.
"""

import numpy as np

from jaxdist.parallel.schedules.rings import IDLE, tick_of


def prove(
    name: str,
    forward: np.ndarray,
    backward: np.ndarray,
    weight: np.ndarray | None,
    num_chunks: int,
) -> None:
    """Raise `ValueError`, naming tick and stage, where tables [ticks, stages] cannot run.

    A backward table that is all IDLE is that of a forward-only schedule.
    """
    proof = _Proof(name, num_chunks, forward.shape[1], int(forward.max()) + 1)
    has_backward = (backward != IDLE).any()
    proof.complete("forward", forward)
    forwards = tick_of(forward, proof.num_entries)
    proof.neighbours("forward", forwards, +1)
    if not has_backward:
        return
    proof.complete("backward", backward)
    backwards = tick_of(backward, proof.num_entries)
    proof.neighbours("backward", backwards, -1)
    last = num_chunks - 1 + num_chunks * np.arange(proof.num_entries // num_chunks)
    proof.follows("backward", backwards, "forward", forwards, proof.num_stages - 1, last)
    if weight is not None:
        proof.complete("weight gradient", weight)
        weights = tick_of(weight, proof.num_entries)
        for stage in range(proof.num_stages):
            entries = np.arange(proof.num_entries)
            proof.follows("weight gradient", weights, "backward", backwards, stage, entries)


class _Proof:
    def __init__(self, name: str, num_chunks: int, num_stages: int, num_entries: int) -> None:
        self.name, self.num_chunks, self.num_stages = name, num_chunks, num_stages
        self.num_entries = -(-max(num_entries, 1) // num_chunks) * num_chunks

    def complete(self, kind: str, table: np.ndarray) -> None:
        """Every stage runs each entry exactly once."""
        for stage in range(self.num_stages):
            column = table[:, stage]
            entries, counts = np.unique(column[column != IDLE], return_counts=True)
            if (counts > 1).any():
                again = entries[counts > 1][0]
                tick = np.flatnonzero(column == again)[1]
                self._refuse(tick, stage, f"{kind} of {self._words(again)} a second time")
            missing = np.setdiff1d(np.arange(self.num_entries), entries)
            if missing.size:
                raise ValueError(
                    f"schedule {self.name!r}: stage {stage} never runs the {kind} of "
                    f"{self._words(missing[0])}; each of microbatches "
                    f"0..{self.num_entries // self.num_chunks - 1} must have one there"
                    + (f" for each of {self.num_chunks} chunks" if self.num_chunks > 1 else "")
                )
            if entries.size > self.num_entries:
                tick = np.flatnonzero(column == entries[-1])[0]
                self._refuse(
                    tick, stage, f"{kind} of {self._words(entries[-1])}, which has no forward"
                )

    def neighbours(self, kind: str, ticks: np.ndarray, by: int) -> None:
        """What a stage sends at the end of a tick arrives in the next tick at the earliest."""
        entries = np.arange(self.num_entries)
        end = self.num_chunks - 1 if by > 0 else 0
        for sender in range(self.num_stages):
            receiver = (sender + by) % self.num_stages
            wraps = not 0 <= sender + by < self.num_stages
            sent = entries[entries % self.num_chunks != end] if wraps else entries
            used = sent + by if wraps else sent
            early = np.flatnonzero(ticks[receiver, used] <= ticks[sender, sent])
            if early.size:
                entry = used[early[0]]
                self._refuse(
                    ticks[receiver, entry],
                    receiver,
                    f"{kind} of {self._words(int(entry))} before it can be there: stage {sender} "
                    f"sends it in tick {ticks[sender, sent[early[0]]]}",
                )

    def follows(
        self,
        kind: str,
        ticks: np.ndarray,
        before: str,
        ticks_before: np.ndarray,
        stage: int,
        entries: np.ndarray,
    ) -> None:
        """`kind` comes in the tick of `before` on the same stage, or later."""
        early = entries[ticks[stage, entries] < ticks_before[stage, entries]]
        if early.size:
            self._refuse(
                ticks[stage, early[0]],
                stage,
                f"{kind} of {self._words(early[0])} before its {before} in tick "
                f"{ticks_before[stage, early[0]]}",
            )

    def _words(self, entry: int) -> str:
        microbatch, chunk = divmod(int(entry), self.num_chunks)
        return f"microbatch {microbatch}" + (f", chunk {chunk}" if self.num_chunks > 1 else "")

    def _refuse(self, tick: int, stage: int, what: str) -> None:
        raise ValueError(f"schedule {self.name!r}: tick {tick}, stage {stage}: {what}")
