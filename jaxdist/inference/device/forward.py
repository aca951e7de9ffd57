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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.config import MeshShape, ModelConfig
from jaxdist.inference.device.buckets import Shape
from jaxdist.inference.device.paging import Paging
from jaxdist.inference.device.step_data import StepData as Step
from jaxdist.inference.weights.packed_experts import kept_experts
from jaxdist.inference.weights.placement import Weights, layer_of, num_layers, platform_of
from jaxdist.inference.weights.products import linear_over_tp
from jaxdist.models.layers import Cache, Context
from jaxdist.ops.linear import Blocks, linear
from jaxdist.ops.paged_attention import Pages, Rows
from jaxdist.ops.rope import Rope, rope_table
from jaxdist.parallel.collectives import psum
from jaxdist.parallel.context import training_context
from jaxdist.parallel.sharding import only
from jaxdist.quantization.packed_layers import KeptLayer, kept_dot

_WHOLE = P(None, None, None)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What the programs of all shapes have in common."""

    weights: Weights
    mesh: Mesh
    compute_dtype: DTypeLike
    kv_dtype: DTypeLike
    paging: Paging
    num_blocks: int  # of one layer's pool

    def program(self, shape: Shape) -> Callable[..., tuple[Array, Array, Array, Any]]:
        """(weights, rope, pages, last tokens [D * slots], packed) ->
        logits [D * B, X, V] in fp32, the residual stream's end [D * B, T, E], the sampler's rows,
        pages.
        """
        mesh_shape = MeshShape(**self.mesh.shape)

        def replica(arrays: Any, rope: Rope, pages: Any, last: Array, packed: Array) -> Any:
            """One replica's stage; every array has lost none of its dims to the mesh yet."""
            rest, stacks = arrays
            step = Step.of(packed, shape)
            tokens_BT = jnp.where(step.tokens < 0, last[step.slots][:, None], step.tokens)
            index_BT = jnp.arange(shape.queries)[None, :]
            positions_BT = jnp.minimum(step.positions[:, None] + index_BT, rope_length(rope) - 1)
            rope = jax.tree.map(lambda table: table[0][positions_BT], rope)
            stacks = jax.tree.map(lambda leaf: leaf[0], stacks)
            pages = jax.tree.map(lambda pool: pool[0, 0], pages)
            stage = lax.axis_index("pp") if mesh_shape.pp > 1 else 0
            x_BTE = rest.embed(tokens_BT, self.context, positions_BT)
            for turn in range(mesh_shape.pp):
                counts = jnp.where(stage == turn, step.counts, 0)
                rows = Rows(step.positions, counts, step.tables)
                x_BTE, pages = self._layers(stacks, x_BTE, rope, rows, pages, stage)
                x_BTE = _to_next_stage(x_BTE)
            if mesh_shape.pp > 1:  # the ring has brought the result to the first stage
                x_BTE = psum(jnp.where(stage == 0, x_BTE, 0), "pp", _WHOLE)
            scored_BXE = jnp.take_along_axis(x_BTE, step.scored(shape)[:, :, None], axis=1)
            logits_BXV = rest.logits(scored_BXE, self.context)
            pages = jax.tree.map(lambda pool: pool[None, None], pages)
            return logits_BXV, x_BTE, step.sampler_rows(shape), pages

        manual = {"dp", "pp"}
        pages_spec: Any = Pages(*(only(spec, *manual) for spec in self.paging.specs))  # pyright: ignore[reportArgumentType]: specs of arrays
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

    def _layers(
        self, stacks: Any, x_BTE: Array, rope: Rope, rows: Rows, pages: Pages, stage: Array | int
    ) -> tuple[Array, Pages]:
        """All layers of a stage, in a loop for each stack of several.

        The pages of all layers lie in one pool, those of layer l from l * num_blocks on.
        """
        first = 0
        for stack in stacks:

            def layer(
                number: Array | int, carry: tuple[Array, Pages], stack=stack, first=first
            ) -> Any:
                index = first + number
                own = rows._replace(tables=rows.tables + index * self.num_blocks)
                block = layer_of(stack, number, self.compute_dtype, self.weights.rules)
                is_local = self._is_local(stage, index)
                return block(carry[0], rope, self._context(own), carry[1], is_local)

            count = num_layers(stack)
            if count == 1:
                x_BTE, pages = layer(0, (x_BTE, pages))
            else:
                x_BTE, pages = lax.fori_loop(0, count, layer, (x_BTE, pages))
            first += count
        return x_BTE, pages

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
        if self.weights.keeps_blocks:
            base = replace(base, experts=kept_experts(mesh.tp))
        elif mesh.tp > 1 and platform_of(self.mesh) != "cpu":
            return replace(base, attend=attend)
        product = linear_over_tp if mesh.tp > 1 else linear

        def dot(x: Array, w: Any) -> Array:
            if isinstance(w, KeptLayer):  # over tp it is left to the partitioner
                return kept_dot(x, w, self.compute_dtype)
            return product(x, w, self.compute_dtype).astype(self.compute_dtype)

        def head(x: Array, table: Array) -> Array:
            weight = Blocks(table, 0, "columns") if table.ndim == 4 else table.T
            return product(x, weight, self.compute_dtype)

        # Shared experts are multiplied as any MLP, for their weights may lie in blocks.
        return replace(base, attend=attend, dot=dot, dots=None, head=head, all_experts=None)

    def _is_local(self, stage: Array | int, index: Array | int) -> bool | Array | None:
        """Whether layer `index` of a stage attends to the window only; None where all do alike."""
        config = self.weights.config
        if not config.sliding_window_pattern:
            return None
        local = [config.is_local(number) for number in range(config.num_hidden_layers)]
        number = stage * (len(local) // self.mesh.shape["pp"]) + index
        if len(set(local)) == 1:
            return local[0]
        return local[number] if isinstance(number, int) else jnp.array(local)[number]


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
        # What is traced has to enter the region as its argument.
        traced = {name: value for name, value in scores.items() if isinstance(value, Array)}
        fixed = {name: value for name, value in scores.items() if name not in traced}

        def own_heads(*arguments: Any) -> tuple[Array, Pages]:
            *given, traced = arguments
            return self._own_heads(*given, **fixed, **traced)

        arguments = (q_BTNH, k_BTKH, v_BTKH, cache, self.rows, traced)
        if self.tp == 1 and not self.paging.needs_region:
            return own_heads(*arguments)
        heads = P(None, None, "tp", None)
        kv_heads = heads if self.config.num_key_value_heads % self.tp == 0 else P()
        pool: Any = Pages(*self.paging.own_specs)  # pyright: ignore[reportArgumentType]: specs of arrays
        return jax.shard_map(
            own_heads,
            axis_names={"tp"},
            in_specs=(heads, kv_heads, kv_heads, pool, P(), P()),
            out_specs=(heads, pool),
            check_vma=False,
        )(*arguments)

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


def _to_next_stage(x: Array) -> Array:
    """`x` of the stage before. Unlike training's it does not mark what differs between stages."""
    size = lax.axis_size("pp")
    if size == 1:
        return x
    ring = [(stage, (stage + 1) % size) for stage in range(size)]
    return jax.shard_map(
        lambda x: lax.ppermute(x, "pp", ring),
        axis_names={"tp"},
        in_specs=_WHOLE,
        out_specs=_WHOLE,
        check_vma=False,
    )(x)


def rope_length(rope: Rope) -> int:
    """Positions that the tables cover."""
    return jax.tree.leaves(rope)[0].shape[1]
