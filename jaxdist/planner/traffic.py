"""The least that a step must send over each mesh axis, by the part of the program that sends it.

Held against what the compiled step sends (`audit.py`). Bytes are those that one device sends: with
n members an all-reduce of a payload P sends 2 (n-1)/n P, a reduce-scatter or all-gather (n-1)/n P,
a permute P, which is what bandwidth-optimal algorithms reach (doi:10.1016/j.jpdc.2008.09.002). In
the formulas that are printed, Psi is the bytes of the parameters of a device's stage and tp slice,
A those of a microbatch's activations [B, T, D] on a dp member, L a stage's layers, M the
microbatches.

Over dp (arXiv 1910.02054): ZeRO-0 and 1 send 2 Psi a step, ZeRO-2 (M+1) Psi, ZeRO-3 3 M Psi: two
gathers and a reduce-scatter a microbatch (embedding and head are gathered once a microbatch, where
they are used; XLA may do so once a step).

Over tp: `layer_traffic.py`.

Over pp: one activation and one cotangent a tick, and what vocabulary parallelism needs, four
all-reduces of A a microbatch: embedding to the first stage, the last stage's output to all, the
head's cotangent to the last stage, the first stage's cotangent to all. Each has one stage that
gives or takes it all, so a broadcast or reduction to one would send (n-1)/n A, half as much; XLA
has none on every platform. At n = 2 a ring's links are as busy either way. Gathering embedding and
head once a step instead would send less when M B T is above the vocabulary, but each stage would
hold a whole table and its gradient.

A slot that is empty still runs where bubbles are not skipped: what it sends is counted apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdist.parallel.pipeline import Pipeline
from jaxdist.parallel.sharding import Layout, layouts
from jaxdist.planner.flow import ONCE, Flow, Turns, add, half, joined
from jaxdist.planner.layer_traffic import LayerTraffic

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The flows of one pipeline's step.

    `parameters` may be abstract; `batch_shape` is [M, B, T] of the global batch. `widened` says
    that 16-bit numbers travel as fp32, as XLA:CPU has it.
    """

    pipeline: Pipeline
    parameters: Tree
    batch_shape: tuple[int, ...]
    widened: bool = False

    def flows(self) -> list[Flow]:
        """All flows that are not empty."""
        found: dict[tuple[tuple[str, ...], str], Flow] = {}
        rooms = self._over_dp(), self._layers_over_tp(), self._vocabulary(), self._rings()
        for flow in chain(*rooms):
            if flow.least > 0:
                key = flow.axes, flow.part
                found[key] = flow if key not in found else joined(found[key], flow)
        return list(found.values())

    # -- dp -----------------------------------------------------------------------------------

    def _over_dp(self) -> list[Flow]:
        zero, share = self.pipeline.parallel.zero, half(self.mesh.dp)
        rest = "" if zero < 2 else " of what dp does not divide"
        reduce = Flow(axes=("dp",), part="reduce_gradients", formula=_TWICE + rest)
        update = Flow(axes=("dp",), part="update", formula="Psi")
        scatter = Flow(axes=("dp",), part="scatter_gradients", formula="M Psi")
        gather = Flow(axes=("dp",), part="gather_parameters", formula="2 M Psi")
        if zero == 1:
            reduce = replace(reduce, formula="Psi")
        for name, layout, leaf in self._leaves:
            size = share * self._local_size(layout, leaf.shape)
            gradient = size * self._width(self.pipeline.reduce_dtype)
            if layout.dp_dim is None or zero == 0:
                reduce = add(reduce, 2 * gradient, [ONCE])
                continue
            if zero == 1:
                reduce = add(reduce, gradient, [ONCE])
            else:
                scatter = add(scatter, gradient, self._uses(name, backward=True))
            if zero < 3:
                update = add(update, size * self._width(leaf.dtype), [ONCE])
            else:
                is_matrix = leaf.ndim - (name == "layers") >= 2
                wire = self.pipeline.compute_dtype if is_matrix else leaf.dtype
                gather = add(gather, size * self._width(wire), self._uses(name, backward=False))
        return [reduce, scatter, update, gather]

    def _uses(self, name: str, *, backward: bool) -> list[Turns]:
        """How often a parameter is gathered, or its gradient scattered."""
        turns, tied = self._turns, self.parameters.lm_head is None
        if name == "layers":
            # Of a stack, whose rows are the layers.
            kinds = ["backward"] if backward else ["forward", "backward"]
            if not backward and self.pipeline.schedule.weight is not None:
                kinds.append("weight")
            rows = self.pipeline.layers.most * self.pipeline.layers.num_chunks
            return [Turns(turns[k].useful / rows, turns[k].idle / rows) for k in kinds]
        if name != "embed_tokens":
            return [turns["score"]]
        # A tied table is gathered once for both, as a tick that scores embeds too.
        if not backward:
            return [turns["embed"]]
        return [turns["embed_backward"], *([turns["score"]] if tied else [])]

    # -- tp -----------------------------------------------------------------------------------

    def _layers_over_tp(self) -> list[Flow]:
        pipeline, found = self.pipeline, []
        layer = LayerTraffic(
            model=pipeline.model,
            remat=pipeline.parallel.remat,
            tp=self.mesh.tp,
            tokens=self._tokens,
            width=self._width(pipeline.compute_dtype),
            sharded_sequence=self._sharded_sequence,
        )
        for part, (there, back, formula) in layer.parts().items():
            flow = Flow(axes=("tp",), part=part, formula=formula)
            flow = add(flow, there, [self._turns["forward"]])
            found.append(add(flow, back, [self._turns["backward"]]))
        return found

    # -- pp -----------------------------------------------------------------------------------

    def _vocabulary(self) -> list[Flow]:
        """Embedding and scoring; in halves of an all-reduce over pp, tp, or both together."""
        whole, turns = self._activations, self._turns
        both = tuple(axis for axis in ("pp", "tp") if self.mesh.__dict__[axis] > 1)
        over_both = half(self.mesh.pp * self.mesh.tp)
        over_pp = 2 * half(self.mesh.pp) * whole / (self.mesh.tp if self._sharded_sequence else 1)
        over_tp = half(self.mesh.tp) * whole
        found: list[Flow] = []

        def flow(axes: tuple[str, ...], part: str, unit: float, formula: str) -> None:
            if axes and unit:
                empty = Flow(axes=axes, part=part, formula=formula)
                found.append(add(empty, unit, [turns[part]]))

        statistics = 3 * 2 * over_both * self._tokens * 4
        if self._sharded_sequence:
            flow(("tp",), "embed", over_tp, "M reduce-scatters of A")
            flow(("pp",), "embed", over_pp, "M all-reduces of A/tp")
            flow(("tp",), "score", 2 * over_tp, "M all-gathers, M reduce-scatters of A")
            flow(("pp",), "score", 2 * over_pp, "2 M all-reduces of A/tp")
            flow(both, "score", statistics, "3 M all-reduces of [B, T]")
            flow(("tp",), "embed_backward", over_tp, "M all-gathers of A")
            flow(("pp",), "embed_backward", over_pp, "M all-reduces of A/tp")
            return found
        flow(both, "embed", 2 * over_both * whole, "M all-reduces of A")
        sums = 2 * over_both * whole + statistics
        if both == ("pp",):
            flow(("pp",), "score", sums + over_pp, "2 M all-reduces of A, 3 M of [B, T]")
        else:
            flow(both, "score", sums, "M all-reduces of A, 3 M of [B, T]")
            flow(("pp",), "score", over_pp, "M all-reduces of A")
        flow(("pp",), "embed_backward", over_pp, "M all-reduces of A")
        return found

    def _rings(self) -> list[Flow]:
        if self.mesh.pp == 1:
            return []
        ticks = sum(self._ticks[kind] for kind in ("forward", "backward"))
        sent = self._activations / (self.mesh.tp if self._sharded_sequence else 1)
        formula = "A/tp" if self._sharded_sequence else "A"
        return [Flow(axes=("pp",), part="ring", least=ticks * sent, formula=f"2 {formula} a tick")]

    # -- what it is made of -------------------------------------------------------------------

    @property
    def mesh(self) -> Any:
        return self.pipeline.mesh

    @property
    def pipeline_rows(self) -> int:
        """B, rows of a microbatch on one dp member."""
        return self.batch_shape[1] // self.mesh.dp

    @property
    def _activations(self) -> float:
        """A: bytes of a microbatch's activations [B, T, D], whole over tp."""
        size = self._tokens * self.pipeline.model.hidden_size
        return size * self._width(self.pipeline.compute_dtype)

    @property
    def _tokens(self) -> int:
        """Tokens of a microbatch on one dp member."""
        return self.pipeline_rows * self.batch_shape[2]

    @property
    def _sharded_sequence(self) -> bool:
        return self.pipeline.parallel.sequence_parallel and self.mesh.tp > 1

    @cached_property
    def _ticks(self) -> dict[str, int]:
        """Ticks in which the program runs each kind of slot on some stage, so on all."""
        ticks: dict[str, int] = {}
        for loop in self.pipeline.schedule.loops:
            for phase in loop.phases:
                for kind in phase.used:
                    ticks[kind] = ticks.get(kind, 0) + loop.count * (phase.stop - phase.start)
        return ticks

    @cached_property
    def _turns(self) -> dict[str, Turns]:
        """Of layers, on an average stage, for kinds of slot; of microbatches, for the ends."""
        pipeline, count = self.pipeline, self.batch_shape[0]
        layers = count * pipeline.model.num_hidden_layers / self.mesh.pp
        turns = {}
        for kind in ("forward", "backward", "weight"):
            run = self._ticks.get(kind, 0) * pipeline.layers.most
            turns[kind] = Turns(layers, 0.0 if pipeline.skip_bubbles else run - layers)
        for kind in ("embed", "score", "embed_backward"):
            extra = kind == "embed" or kind == "embed_backward"
            run = self._ticks[kind] + (pipeline.schedule.lead if extra else 0)
            turns[kind] = Turns(count, max(run - count, 0))
        return turns

    @cached_property
    def _leaves(self) -> list[tuple[str, Layout, jax.ShapeDtypeStruct]]:
        """(field of the model, layout, array) of each parameter."""
        tree = layouts(self.parameters, self.pipeline.rules)
        paths = jax.tree_util.tree_leaves_with_path(self.parameters)
        return [
            (_field(path), layout, leaf)
            for (path, leaf), layout in zip(paths, jax.tree.leaves(tree), strict=True)
        ]

    def _local_size(self, layout: Layout, shape: Iterable[int]) -> float:
        """Elements on one (pp, tp) member, whole over dp."""
        size = 1.0
        for length, entry in zip(shape, layout.spec, strict=True):
            names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            for axis in names:
                length //= getattr(self.mesh, axis)
            size *= length
        return size

    def _width(self, dtype: DTypeLike) -> int:
        """Bytes of a number on the wire."""
        width = jnp.dtype(dtype).itemsize
        return max(width, 4) if self.widened else width


_TWICE = "2 Psi"


def _field(path: tuple[Any, ...]) -> str:
    """The field of the model in which a leaf lies."""
    return jax.tree_util.keystr(path[:1]).strip("[]'.")
