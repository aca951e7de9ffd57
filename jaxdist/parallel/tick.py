"""One tick of a schedule on one (dp, pp) member.

Every stage runs its forward slot, the first on what all stages have embedded; all stages score the
microbatch that the last stage has just forwarded; every stage runs its backward slot and its weight
gradients; ring permutes hand activations down and cotangents up.

Shapes: B rows of a microbatch on this dp member, T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdist.ops.stacks import read, write
from jaxdist.parallel.collectives import ring_shift, vary
from jaxdist.parallel.ends import with_fields
from jaxdist.parallel.schedules.phases import Phase
from jaxdist.parallel.schedules.rings import IDLE, Ring
from jaxdist.parallel.schedules.schedule import Schedule
from jaxdist.parallel.stage import Rings, Work
from jaxdist.parallel.vocabulary import Scored

if TYPE_CHECKING:
    from jaxdist.parallel.executor import Executor

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(kw_only=True)
class Carry:
    """What goes from tick to tick; None where the schedule has no use for it."""

    loss: Array  # [] of this stage
    activation: Array  # [B, T, D] arrived from the stage before
    cotangent: Array | None = None  # [B, T, D] arrived from the stage after
    down_inbox: Array | None = None  # [slots, B, T, D] activations that came too early
    up_inbox: Array | None = None  # [slots, B, T, D] cotangents that came too early
    embedded: Array | None = None  # [B, T, D] embedding for this tick
    leaving: Array | None = None  # [B, T, D] what the last backward sent up
    waiting: Array | None = None  # [slots, B, T, D] scored cotangents whose backward comes later
    residuals: Rings
    taps: Rings
    gradients: Tree = None  # None: forwards alone
    ready_forward: Tree = None  # the layer that the next forward begins with, gathered (ZeRO-3)
    ready_backward: Tree = None  # the same of the next backward


class Tick:
    """A tick while it runs: `now` is what it makes of the carry of the tick before."""

    def __init__(
        self, member: Executor, schedule: Schedule, phase: Phase, index: Array, carry: Carry
    ) -> None:
        self.member, self.schedule, self.phase, self.index = member, schedule, phase, index
        self.now = replace(carry)
        self.scored: Scored | None = None

    def run(self) -> Carry:
        """All slots, in the order in which one may need another."""
        now, schedule, used = self.now, self.schedule, self.phase.used
        left_before = now.leaving
        if "forward" in used:
            down = self._forward()
            if "score" in used:
                self._score(down)
            now.activation = self._shift(down, +1)
            now.down_inbox = self._stored(schedule.down_inbox, now.down_inbox, now.activation)
        if "backward" in used:
            up = self._backward()
            if schedule.lead:
                now.leaving = up
            elif "embed_backward" in used:
                self._embed_backward(self.index, up)
            now.cotangent = self._shift(up, -1)
            now.up_inbox = self._stored(schedule.up_inbox, now.up_inbox, now.cotangent)
        if "weight" in used:
            self._weights()
        if schedule.lead and "embed_backward" in used:
            self._embed_backward(self.index - 1, present(left_before))
        if schedule.lead and "embed" in used:
            now.embedded = self.member.ends.embed(read(_row(schedule.embed), self.index + 1))
        return now

    def _forward(self) -> Array:
        """The forward slot: what goes down."""
        now, schedule, member = self.now, self.schedule, self.member
        entry = self._own(schedule.forward)
        x = self._arrived(schedule.down_inbox, schedule.forward, now.down_inbox, now.activation)
        embedded = now.embedded
        if schedule.lead == 0 and "embed" in self.phase.used:
            embedded = member.ends.embed(read(jnp.asarray(schedule.forward), self.index, 0))
        if embedded is not None:
            x = jnp.where(self._is_end(entry, stage=0, chunk=0), embedded, x)
        inputs = self._inputs(entry)
        if now.gradients is None:
            return member.stage.forward_only(x, inputs, self._work("forward", entry))
        work = self._work("forward", entry, self._own(schedule.residuals.writes))
        down, own_loss, now.residuals, now.ready_forward = member.stage.forward(
            x, inputs, now.residuals, work, now.ready_forward
        )
        if own_loss is not None:
            now.loss += jnp.where(entry != IDLE, own_loss, 0.0)
        return down

    def _score(self, x: Array) -> None:
        now, schedule, ends = self.now, self.schedule, self.member.ends
        microbatch = read(jnp.asarray(schedule.score), self.index)
        always = "score" in self.phase.full
        if now.gradients is None:
            now.loss += ends.loss(microbatch, x, always=always)
            return
        self.scored, now.gradients = ends.score(microbatch, x, now.gradients, always=always)
        now.loss += self.scored.loss
        if schedule.waiting is not None and now.waiting is not None:
            slot = read(_row(schedule.waiting.writes[:, 0]), self.index)
            now.waiting = write(now.waiting, vary(present(self.scored.cotangent)), slot)

    def _backward(self) -> Array:
        """The backward slot: the cotangent that goes up."""
        now, schedule, stage = self.now, self.schedule, self.member.stage
        entry = self._own(schedule.backward)
        up = self._arrived(schedule.up_inbox, schedule.backward, now.up_inbox, now.cotangent)
        scored = self._scored_cotangent()
        if scored is not None:
            last = schedule.num_stages - 1, schedule.num_chunks - 1
            up = jnp.where(self._is_end(entry, stage=last[0], chunk=last[1]), scored, up)
        is_busy = entry != IDLE
        if not self.member.pipeline.skip_bubbles:
            # A backward is linear in its cotangent, so that an empty slot adds nothing.
            up = jnp.where(is_busy, up, jnp.zeros_like(up))
        inputs = self._inputs(entry)
        work = self._work("backward", entry, self._own(schedule.residuals.reads(schedule.backward)))
        layers, loss_cotangent = now.gradients.layers, jnp.where(is_busy, 1.0, 0.0)
        if schedule.taps is None:
            up, layers, now.ready_backward = stage.backward(
                up, inputs, now.residuals, work, layers, loss_cotangent, now.ready_backward
            )
        else:
            slot = self._own(schedule.taps.writes)
            up, now.taps, layers, now.ready_backward = stage.backward_input(
                up,
                inputs,
                now.residuals,
                now.taps,
                slot,
                work,
                layers,
                loss_cotangent,
                now.ready_backward,
            )
        now.gradients = with_fields(now.gradients, layers=layers)
        return up

    def _weights(self) -> None:
        """The weight gradients' slot."""
        now, schedule = self.now, self.schedule
        assert schedule.weight is not None and schedule.taps is not None
        entry = self._own(schedule.weight)
        work = self._work("weight", entry, self._own(schedule.residuals.reads(schedule.weight)))
        layers = self.member.stage.backward_weight(
            now.activation,
            self._inputs(entry),
            now.residuals,
            now.taps,
            self._own(schedule.taps.reads(schedule.weight)),
            work,
            now.gradients.layers,
            entry != IDLE,
        )
        now.gradients = with_fields(now.gradients, layers=layers)

    def _embed_backward(self, tick: Array, cotangent: Array) -> None:
        """Add the embedding's gradient of what left the first stage in `tick`."""
        microbatch = read(_row(self.schedule.embed_backward), tick)
        ends = self.member.ends
        self.now.gradients = ends.embed_backward(microbatch, cotangent, self.now.gradients)

    def _scored_cotangent(self) -> Array | None:
        """What the last stage's last chunk takes back; None in a phase where it does not."""
        ring, waiting = self.schedule.waiting, self.now.waiting
        if ring is not None and waiting is not None:
            slots = ring.reads(self.schedule.score_backward[:, None])
            return read(waiting, read(_row(slots[:, 0]), self.index))
        return None if self.scored is None else vary(present(self.scored.cotangent))

    def _arrived(
        self, ring: Ring | None, table: np.ndarray, inbox: Array | None, arrived: Array | None
    ) -> Array:
        """What a slot works on, out of the inbox where there is one."""
        if ring is None:
            return present(arrived)
        return read(present(inbox), self._own(ring.reads(table)))

    def _stored(self, ring: Ring | None, inbox: Array | None, arrived: Array) -> Array | None:
        """The inbox with what has come for the next tick."""
        if ring is None:
            return inbox
        after = np.append(ring.writes[1:], np.zeros_like(ring.writes[:1]), axis=0)
        return write(present(inbox), arrived, self._own(after))

    def _work(self, kind: str, entry: Array, slot: Array | int = 0) -> Work:
        """The layers to run: all of the stretch, or none in a bubble (which else computes garbage).

        Where bubbles are not skipped, all loops have a fixed length, and short stretches run their
        empty rows too, which costs nothing: the longest one sets the pace.
        """
        layers, chunk, skip = self.member.layers, self._chunk(entry), self.member.skip_bubbles
        then: Array | int = 0
        if self.member.zero.gathers and kind in ("forward", "backward"):
            then = self._own(self.member.first_rows(self.schedule, kind)[1:])
        count: Array | int = layers.most
        if not layers.is_even:
            count = read(vary(jnp.asarray(layers.table)), chunk, self.member.index)
        if not skip:
            live = None if layers.is_even else count
            count = layers.most
            return Work(first=chunk * count, trips=count, live=live, slot=slot, then=then)
        if kind not in self.phase.full:
            count = jnp.where(entry != IDLE, count, 0)
        return Work(first=chunk * layers.most, trips=count, slot=slot, then=then)

    def _is_end(self, entry: Array, *, stage: int, chunk: int) -> Array:
        is_end = self.member.index == stage
        return is_end if self.schedule.num_chunks == 1 else is_end & (self._chunk(entry) == chunk)

    def _chunk(self, entry: Array) -> Array | int:
        chunks = self.schedule.num_chunks
        return 0 if chunks == 1 else jnp.maximum(entry, 0) % chunks

    def _inputs(self, entry: Array) -> Tree:
        """What all layers are given with a microbatch."""
        chunks = self.schedule.num_chunks
        return self.member.inputs(entry if chunks == 1 else jnp.maximum(entry, 0) // chunks)

    def _own(self, table: np.ndarray) -> Array:
        """This stage's entry of a table [ticks, stages]."""
        return read(vary(jnp.asarray(table, jnp.int32)), self.index, self.member.index)

    def _shift(self, x: Array, by: int) -> Array:
        return ring_shift(x, "pp", by, self.member.residual_spec)


def present(x: Array | None) -> Array:
    """`x`, of a carry whose schedule has a use for it."""
    assert x is not None
    return x


def _row(table: np.ndarray) -> Array:
    """A table [ticks] on the device, with an empty tick at its end."""
    return jnp.asarray(np.append(table, IDLE), jnp.int32)
