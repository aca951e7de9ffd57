"""The program of a step: some rows of tokens through the model, their keys and values into pages.

Shapes: D replicas, and of one replica B rows, T queries, W blocks of a row, N query heads,
K key/value heads, H head dim, V vocabulary, X scored queries of a row (1 or T), E hidden size.

dp and pp are manual, tp is the partitioner's, as in training. Stages take turns: in turn s what
stage s computes is passed on, and what the others compute meanwhile is dropped (their keys and
values go to the null page). A step so takes as long as on one stage, and pp saves memory only:
rows are not cut into microbatches, which would fill the turns but read each weight once for each.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.config import MeshShape, ModelConfig
from jaxdist.inference.buckets import Shape
from jaxdist.inference.paging import Paging
from jaxdist.inference.placement import Weights
from jaxdist.inference.step_data import StepData as Step
from jaxdist.models.layers import Cache, Context
from jaxdist.ops.linear import linear
from jaxdist.ops.paged_attention import Pages, Rows
from jaxdist.ops.rope import Rope, rope_table
from jaxdist.parallel.collectives import psum, ring_shift
from jaxdist.parallel.context import training_context
from jaxdist.parallel.sharding import only

_WHOLE = P(None, None, None)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What the programs of all shapes have in common."""

    weights: Weights
    mesh: Mesh
    compute_dtype: DTypeLike
    kv_dtype: DTypeLike
    paging: Paging

    def program(self, shape: Shape) -> Callable[..., tuple[Array, Array, Array, Any]]:
        """(weights, rope, pages, last tokens [D * slots], packed) ->
        logits [D * B, X, V] in fp32, the residual stream's end [D * B, T, E], the sampler's rows,
        pages.
        """
        config, mesh_shape = self.weights.config, MeshShape(**self.mesh.shape)

        def replica(arrays: Any, rope: Rope, pages: Any, last: Array, packed: Array) -> Any:
            """One replica's stage; every array has lost none of its dims to the mesh yet."""
            rest, layers = arrays
            step = Step.of(packed, shape)
            tokens_BT = jnp.where(step.tokens < 0, last[step.slots][:, None], step.tokens)
            index_BT = jnp.arange(shape.queries)[None, :]
            positions_BT = jnp.minimum(step.positions[:, None] + index_BT, rope_length(rope) - 1)
            rope = jax.tree.map(lambda table: table[0][positions_BT], rope)
            layers = [jax.tree.map(lambda leaf: leaf[0], layer) for layer in layers]
            pages = [Pages(*(pool[0, 0] for pool in layer)) for layer in pages]
            stage = lax.axis_index("pp") if mesh_shape.pp > 1 else 0
            ctx = self._context(Rows(step.positions, step.counts, step.tables))
            x_BTE = rest.embed(tokens_BT, ctx, positions_BT)
            for turn in range(mesh_shape.pp):
                counts = jnp.where(stage == turn, step.counts, 0)
                ctx = self._context(Rows(step.positions, counts, step.tables))
                for number, layer in enumerate(layers):
                    is_local = self._is_local(stage, number)
                    x_BTE, pages[number] = layer(x_BTE, rope, ctx, pages[number], is_local)
                x_BTE = ring_shift(x_BTE, "pp", 1, _WHOLE)
            if mesh_shape.pp > 1:  # the ring has brought the result to the first stage
                x_BTE = psum(jnp.where(stage == 0, x_BTE, 0), "pp", _WHOLE)
            scored_BXE = jnp.take_along_axis(x_BTE, step.scored(shape)[:, :, None], axis=1)
            logits_BXV = rest.logits(scored_BXE, ctx)
            pages = tuple(Pages(*(pool[None, None] for pool in layer)) for layer in pages)
            return logits_BXV, x_BTE, step.sampler_rows(shape), pages

        manual = {"dp", "pp"}
        pool = only(self.paging.spec, *manual)
        num_layers = config.num_hidden_layers // mesh_shape.pp
        pages_spec = (Pages(pool, pool),) * num_layers
        specs = jax.tree.map(
            lambda spec: only(spec, *manual), self.weights.specs, is_leaf=lambda s: isinstance(s, P)
        )
        return jax.shard_map(
            replica,
            mesh=self.mesh,
            axis_names=manual,
            in_specs=(specs, P(), pages_spec, P("dp"), P("dp")),
            out_specs=(P("dp"), P("dp"), P("dp"), pages_spec),
            check_vma=False,
        )

    def rope(self, max_model_len: int) -> Rope:
        """Tables [1, max_model_len, ...] of every position, of which a step takes its own."""
        positions = jnp.arange(max_model_len)[None, :]
        return jax.jit(lambda: rope_table(self.weights.config, positions))()

    @property
    def context(self) -> Context:
        """That of embedding and head, which never attend."""
        return self._context(None)

    def _context(self, rows: Rows | None) -> Context:
        config, rules = self.weights.config, self.weights.rules
        mesh = MeshShape(**self.mesh.shape)
        base = training_context(config, rules, mesh, None, self.compute_dtype)
        attend = _Attend(
            config=config, rows=rows, kv_dtype=self.kv_dtype, paging=self.paging, tp=mesh.tp
        )
        if mesh.tp > 1:
            return replace(base, attend=attend)

        def dot(x: Array, w: Array) -> Array:
            return linear(x, w, self.compute_dtype).astype(self.compute_dtype)

        def head(x: Array, table: Array) -> Array:
            table = table.T if table.ndim == 2 else table
            return linear(x, table, self.compute_dtype)

        return replace(base, attend=attend, dot=dot, dots=None, head=head)

    def _is_local(self, stage: Array | int, number: int) -> bool | Array | None:
        """Whether layer `number` of a stage attends to the window only; None where all do alike."""
        config, num_stages = self.weights.config, self.mesh.shape["pp"]
        if not config.sliding_window_pattern:
            return None
        num_layers = config.num_hidden_layers // num_stages
        local = [config.is_local(s * num_layers + number) for s in range(num_stages)]
        return local[0] if len(set(local)) == 1 else jnp.array(local)[stage]


@dataclass(frozen=True, kw_only=True)
class _Attend:
    """`Context.attend` over pages; the cache of a layer is its `Pages`."""

    config: ModelConfig
    rows: Rows | None
    kv_dtype: DTypeLike
    paging: Paging
    tp: int

    def __call__(
        self, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, cache: Cache, **scores: Any
    ) -> tuple[Array, Cache]:
        own_heads = partial(self._own_heads, **scores)
        if self.tp == 1 and not self.paging.needs_region:
            return own_heads(q_BTNH, k_BTKH, v_BTKH, cache, self.rows)
        heads = P(None, None, "tp", None)
        kv_heads = heads if self.config.num_key_value_heads % self.tp == 0 else P()
        pool = self.paging.own_spec
        return jax.shard_map(
            own_heads,
            axis_names={"tp"},
            in_specs=(heads, kv_heads, kv_heads, pool, P()),
            out_specs=(heads, pool),
            check_vma=False,
        )(q_BTNH, k_BTKH, v_BTKH, cache, self.rows)

    def _own_heads(
        self,
        q_BTNH: Array,
        k_BTKH: Array,
        v_BTKH: Array,
        pages: Pages,
        rows: Rows,
        is_local: bool | Array | None = None,
        **scores: Any,
    ) -> tuple[Array, Pages]:
        """The heads of one member of tp, all of whose query heads share what it keeps."""
        if k_BTKH.shape[2] != self.paging.num_heads(pages):
            own = lax.axis_index("tp") * k_BTKH.shape[2] // self.tp
            k_BTKH, v_BTKH = (lax.dynamic_slice_in_dim(x, own, 1, axis=2) for x in (k_BTKH, v_BTKH))
        pages = self.paging.write(pages, k_BTKH, v_BTKH, rows, dtype=self.kv_dtype)
        out_BTNH = self.paging.attend(
            q_BTNH,
            pages,
            rows,
            dtype=self.kv_dtype,
            sliding_window=self.config.sliding_window,
            is_local=is_local,
            **scores,
        )
        return out_BTNH, pages


def rope_length(rope: Rope) -> int:
    """Positions that the tables cover."""
    return jax.tree.leaves(rope)[0].shape[1]
