"""Experts spread over tp: each member has some, multiplies the tokens that take them, and all sum.

The tokens are whole on every member, as everywhere in a block, so nothing is sent to experts; the
sum is the one that a dense MLP's down projection needs too. Where the sequence is sharded it is a
reduce-scatter. The backward pass makes the hidden layers again.

Shapes: B batch rows, T tokens, D hidden size, K experts a token takes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.ops.experts import Weights, routed_experts
from jaxdist.parallel.collectives import sum_into, vary

_WHOLE = P(None, None, None)
_OWN = (P("tp"),) * 3  # of the weights, by experts

Activation = Callable[[Array, Array], Array]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def sharded_experts(
    x_BTD: Array,
    weights: Weights,
    chosen_BTK: Array,
    shares_BTK: Array,
    residual: P,
    activation: Activation,
    compute_dtype: DTypeLike,
) -> Array:
    """`ops.experts.routed_experts` in the compute dtype; tp shards the result by `residual`."""

    def own(*arrays: Any) -> Array:
        out_BTD = _own_experts(*arrays, activation=activation, compute_dtype=compute_dtype)
        return sum_into(residual, out_BTD.astype(compute_dtype), ("tp",))

    x_BTD = lax.with_sharding_constraint(x_BTD, _WHOLE)
    specs = (_WHOLE, _OWN, _WHOLE, _WHOLE)
    return jax.shard_map(own, axis_names={"tp"}, in_specs=specs, out_specs=residual)(
        x_BTD, weights, chosen_BTK, shares_BTK
    )


def _forward(x_BTD: Array, weights: Weights, chosen_BTK: Array, shares_BTK: Array, *static: Any):
    out_BTD = sharded_experts(x_BTD, weights, chosen_BTK, shares_BTK, *static)
    return out_BTD, (x_BTD, weights, chosen_BTK, shares_BTK)


def _backward(
    residual: P, activation: Activation, compute_dtype: DTypeLike, kept: Any, dout_BTD: Array
) -> tuple[Array, Weights, None, Array]:
    def own(
        x_BTD: Array, weights: Weights, chosen_BTK: Array, shares_BTK: Array, dout_BTD: Array
    ) -> tuple[Array, Weights, Array]:
        x_BTD, shares_BTK, dout_BTD = (vary(a, ("tp",)) for a in (x_BTD, shares_BTK, dout_BTD))

        def forward(x_BTD: Array, weights: Weights, shares_BTK: Array) -> Array:
            return _own_experts(
                x_BTD,
                weights,
                chosen_BTK,
                shares_BTK,
                activation=activation,
                compute_dtype=compute_dtype,
            )

        _, pull = jax.vjp(forward, x_BTD, weights, shares_BTK)
        dx_BTD, dweights, dshares_BTK = pull(dout_BTD.astype(jnp.float32))
        return sum_into(residual, dx_BTD, ("tp",)), dweights, lax.psum(dshares_BTK, "tp")

    x_BTD, weights, chosen_BTK, shares_BTK = kept
    x_BTD, dout_BTD = (lax.with_sharding_constraint(a, _WHOLE) for a in (x_BTD, dout_BTD))
    dx_BTD, dweights, dshares_BTK = jax.shard_map(
        own,
        axis_names={"tp"},
        in_specs=(_WHOLE, _OWN, _WHOLE, _WHOLE, _WHOLE),
        out_specs=(residual, _OWN, _WHOLE),
    )(x_BTD, weights, chosen_BTK, shares_BTK, dout_BTD)
    return dx_BTD, dweights, None, dshares_BTK


sharded_experts.defvjp(_forward, _backward)


def _own_experts(
    x_BTD: Array, weights: Weights, chosen_BTK: Array, shares_BTK: Array, **how: Any
) -> Array:
    first = lax.axis_index("tp") * weights[0].shape[0]
    return routed_experts(x_BTD, weights, chosen_BTK, shares_BTK, first=first, **how)
