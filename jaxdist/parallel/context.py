"""The model's surroundings inside the pipeline: precision, attention, sharding over tp."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxdist.config import MeshShape, ModelConfig
from jaxdist.models.layers import Axes, Cache, Context
from jaxdist.ops.attention import causal_attention
from jaxdist.ops.dot import dot
from jaxdist.ops.product import platform
from jaxdist.parallel.attention import by_heads
from jaxdist.parallel.experts import sharded_experts
from jaxdist.parallel.products import contract, expand
from jaxdist.parallel.sharding import Rules, only


def training_context(
    config: ModelConfig,
    rules: Rules,
    mesh: MeshShape,
    segment_ids_BT: Array | None,
    compute_dtype: DTypeLike,
) -> Context:
    """Causal attention within segments, activations sharded over tp by `rules`."""
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    constrain = rules.constrain if mesh.tp > 1 else lambda x, axes: x
    heads = ("batch", "length", "heads", "head_dim")

    def attend(
        q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, cache: Cache, **scores: Any
    ) -> tuple[Array, Cache]:
        if num_kv_heads % mesh.tp:
            # Each member attends with its own query heads, so it takes a copy of their kv heads.
            group = num_heads // num_kv_heads
            k_BTKH, v_BTKH = (
                constrain(jnp.repeat(x, group, axis=2), heads) for x in (k_BTKH, v_BTKH)
            )
        # `is_local` may be traced; all else is known.
        is_local = scores.pop("is_local", None)
        traced, fixed = (is_local, None) if isinstance(is_local, Array) else (None, is_local)

        def attention(
            q_BTNH: Array,
            k_BTKH: Array,
            v_BTKH: Array,
            segment_ids_BT: Array | None,
            traced: Array | None,
        ) -> Array:
            return causal_attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                segment_ids=segment_ids_BT,
                sliding_window=config.sliding_window,
                is_local=fixed if traced is None else traced,
                **scores,
            )

        extra = segment_ids_BT, traced
        if platform() in ("gpu", "tpu"):
            return by_heads(attention, q_BTNH, k_BTKH, v_BTKH, extra), cache
        return attention(q_BTNH, k_BTKH, v_BTKH, *extra), cache

    if mesh.tp == 1:
        products = {"dot": partial(dot, compute_dtype=compute_dtype)}
    else:
        products = _products(rules, compute_dtype)
    return Context(
        **products,
        attend=attend,
        constrain=constrain,
        compute_dtype=compute_dtype,
    )


def _products(rules: Rules, compute_dtype: DTypeLike) -> dict[str, Callable[..., Any]]:
    """`dot`, which in a block joins the residual stream, `dots`, which leave it, and experts."""
    residual = only(rules.spec(("batch", "sequence", "embed")), "tp")

    def dots(x: Array, weights: Sequence[Array], out_axes: Axes) -> tuple[Array, ...]:
        sharded = tuple(rules.table.get(axis) == "tp" for axis in out_axes)
        if not any(sharded):
            return tuple(dot(x, w, compute_dtype) for w in weights)
        return expand(x, tuple(weights), sharded, residual, compute_dtype)

    def experts(*arrays: Any, activation: Any, compute_dtype: DTypeLike) -> Array:
        return sharded_experts(*arrays, None, residual, activation, compute_dtype)

    def all_experts(*arrays: Any, activation: Any, compute_dtype: DTypeLike) -> Array:
        return sharded_experts(*arrays, residual, activation, compute_dtype)

    return {
        "dot": lambda x, w: contract(x, w, residual, compute_dtype),
        "dots": dots,
        "experts": experts,
        "all_experts": all_experts,
    }
