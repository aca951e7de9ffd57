"""Experts spread over tp: each member has some, multiplies the tokens that take them, and all sum.

The tokens are whole on every member, as everywhere in a block, so nothing is sent to experts; the
sum is the one that a dense MLP's down projection needs too. Where the sequence is sharded it is a
reduce-scatter. The backward pass makes the experts' hidden layers again.

An MLP that every token takes besides, the shared experts, lies over tp by its features. A member
adds its part of that to its experts' before the sum, so that one serves both, either way.

Shapes: B batch rows, T tokens, D hidden size, K experts a token takes, F features of the MLP.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.ops.dot import dot
from jaxdist.ops.experts import Weights, routed_experts
from jaxdist.parallel.collectives import sum_into, vary
from jaxdist.parallel.products import pull_all, rounded_sum

_WHOLE, _FEATURES = P(None, None, None), P(None, None, "tp")
_OWN = (P("tp"),) * 3  # of the weights, by experts
_COLUMNS, _ROWS = P(None, "tp"), P("tp", None)  # of the MLP's weights [D, F] and [F, D]

Activation = Callable[[Array, Array], Array]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def sharded_experts(
    x_BTD: Array,
    weights: Weights,
    chosen_BTK: Array,
    shares_BTK: Array,
    shared: Weights | None,
    residual: P,
    activation: Activation,
    compute_dtype: DTypeLike,
) -> Array:
    """`ops.experts.routed_experts` in the compute dtype; tp shards the result by `residual`.

    With `shared`, the gate and up [D, F] and the down [F, D] of an MLP, its output is added.
    """
    arrays = x_BTD, weights, chosen_BTK, shares_BTK, shared
    return _forward(*arrays, residual, activation, compute_dtype)[0]


def _forward(
    x_BTD: Array,
    weights: Weights,
    chosen_BTK: Array,
    shares_BTK: Array,
    shared: Weights | None,
    residual: P,
    activation: Activation,
    compute_dtype: DTypeLike,
) -> tuple[Array, Any]:
    how = {"activation": activation, "compute_dtype": compute_dtype}

    def own(
        x_BTD: Array, weights: Weights, chosen_BTK: Array, shares_BTK: Array, shared: Any
    ) -> tuple[Array, list[Array]]:
        out_BTD = _own_experts(x_BTD, weights, chosen_BTK, shares_BTK, **how)
        hidden: list[Array] = []
        if shared is not None:
            gate_DF, up_DF, down_FD = shared
            hidden = [dot(vary(x_BTD, ("tp",)), w_DF, compute_dtype) for w_DF in (gate_DF, up_DF)]
            shared_BTD: Any = dot(activation(*hidden), down_FD, compute_dtype)
            out_BTD += shared_BTD.astype(jnp.float32)
        return sum_into(residual, out_BTD.astype(compute_dtype), ("tp",)), hidden

    specs = (_WHOLE, _OWN, _WHOLE, _WHOLE, None if shared is None else (_COLUMNS, _COLUMNS, _ROWS))
    out_BTD, hidden = jax.shard_map(
        own, axis_names={"tp"}, in_specs=specs, out_specs=(residual, _FEATURES)
    )(lax.with_sharding_constraint(x_BTD, _WHOLE), weights, chosen_BTK, shares_BTK, shared)
    names = ("gate_proj", "up_proj")[: len(hidden)]
    hidden = [checkpoint_name(a_BTF, name) for a_BTF, name in zip(hidden, names, strict=True)]
    return out_BTD, (x_BTD, weights, chosen_BTK, shares_BTK, shared, hidden)


def _backward(
    residual: P, activation: Activation, compute_dtype: DTypeLike, kept: Any, dout_BTD: Array
) -> tuple[Array, Weights, None, Array, Weights | None]:
    x_BTD, weights, chosen_BTK, shares_BTK, shared, hidden = kept

    def whole(a_BTD: Array) -> Array:
        return lax.with_sharding_constraint(a_BTD, _WHOLE)

    def own_experts(
        x_BTD: Array, weights: Weights, chosen_BTK: Array, shares_BTK: Array, dout_BTD: Array
    ) -> tuple[Array, Weights, Array]:
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
        return pull(dout_BTD.astype(jnp.float32))

    def own(
        x_BTD: Array,
        weights: Weights,
        chosen_BTK: Array,
        shares_BTK: Array,
        dout_BTD: Array,
        shared: Any,
        hidden: list[Array],
    ) -> tuple[Array, Weights, Array, list[Array]]:
        x_BTD, shares_BTK, dout_BTD = (vary(a, ("tp",)) for a in (x_BTD, shares_BTK, dout_BTD))
        dx_BTD, dweights, dshares_BTK = own_experts(
            x_BTD, weights, chosen_BTK, shares_BTK, dout_BTD
        )
        parts, dhidden = [dx_BTD], []
        if shared is not None:
            gate_DF, up_DF, down_FD = shared
            inner_BTF, pull = jax.vjp(activation, *hidden)
            ((dinner_BTF,), _) = pull_all(inner_BTF, [(down_FD, dout_BTD)], compute_dtype)
            dhidden = list(pull(dinner_BTF))
            pairs = list(zip((gate_DF, up_DF), dhidden, strict=True))
            parts += pull_all(x_BTD, pairs, compute_dtype)[0]
        dx_BTD = sum_into(residual, rounded_sum(parts), ("tp",))
        return dx_BTD, dweights, lax.psum(dshares_BTK, "tp"), dhidden

    specs = None if shared is None else (_COLUMNS, _COLUMNS, _ROWS)
    dx_BTD, dweights, dshares_BTK, dhidden = jax.shard_map(
        own,
        axis_names={"tp"},
        in_specs=(_WHOLE, _OWN, _WHOLE, _WHOLE, _WHOLE, specs, _FEATURES),
        out_specs=(residual, _OWN, _WHOLE, _FEATURES),
    )(whole(x_BTD), weights, chosen_BTK, shares_BTK, whole(dout_BTD), shared, hidden)
    if shared is None:
        return dx_BTD, dweights, None, dshares_BTK, None

    # A region of its own, so that a schedule may make these gradients later (`split.py`), of what
    # is kept or comes anyway: made whole once for both, it would have to wait as a copy.
    def own_weights(x_BTD: Array, dout_BTD: Array, shared: Any, hidden: Any, dhidden: Any) -> Any:
        x_BTD, dout_BTD = (vary(a, ("tp",)) for a in (x_BTD, dout_BTD))
        pairs = list(zip(shared[:2], dhidden, strict=True))
        into = pull_all(x_BTD, pairs, compute_dtype)[1]
        out_of = pull_all(activation(*hidden), [(shared[2], dout_BTD)], compute_dtype)[1]
        return (*into, *out_of)

    dshared = jax.shard_map(
        own_weights,
        axis_names={"tp"},
        in_specs=(_WHOLE, _WHOLE, specs, _FEATURES, _FEATURES),
        out_specs=specs,
    )(whole(x_BTD), whole(dout_BTD), shared, hidden, dhidden)
    return dx_BTD, dweights, None, dshares_BTK, dshared


sharded_experts.defvjp(_forward, _backward)


def _own_experts(
    x_BTD: Array, weights: Weights, chosen_BTK: Array, shares_BTK: Array, **how: Any
) -> Array:
    first = lax.axis_index("tp") * weights[0].shape[0]
    return routed_experts(x_BTD, weights, chosen_BTK, shares_BTK, first=first, **how)
