"""Experts that stay in the blocks of their file, on one device or spread over tp.

Shapes: B batch rows, T tokens, D hidden size, K experts a token takes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.ops.experts import Weights, routed_experts
from jaxdist.quantization.packed_layers import KeptLayer, kept_grouped_dot

_WHOLE = P(None, None, None)


def kept_experts(tp: int) -> Callable[..., Array]:
    """The `experts` of a Context, of which some weights are `KeptLayer`s."""
    routed = partial(routed_experts, grouped=kept_grouped_dot)
    if tp == 1:
        return routed

    def experts(
        x_BTD: Array,
        weights: Weights,
        chosen_BTK: Array,
        shares_BTK: Array,
        *,
        activation: Callable[[Array, Array], Array],
        compute_dtype: DTypeLike,
    ) -> Array:
        def own(x_BTD: Array, weights: Any, chosen_BTK: Array, shares_BTK: Array) -> Array:
            out_BTD = routed(
                x_BTD,
                weights,
                chosen_BTK,
                shares_BTK,
                activation=activation,
                compute_dtype=compute_dtype,
                first=lax.axis_index("tp") * weights[0].shape[0],
            )
            return lax.psum(out_BTD.astype(compute_dtype), "tp")

        return jax.shard_map(
            own,
            axis_names={"tp"},
            in_specs=(_WHOLE, tuple(map(_specs, weights)), _WHOLE, _WHOLE),
            out_specs=_WHOLE,
            check_vma=False,
        )(x_BTD, weights, chosen_BTK, shares_BTK)

    return experts


def _specs(weight: KeptLayer | Array) -> Any:
    """By experts: the first dim of a layer, the second of a stack."""
    if not isinstance(weight, KeptLayer):
        return P("tp")
    stacks = jax.tree.map(lambda _: P(None, "tp"), weight.stacks)
    return KeptLayer(stacks=stacks, kind=P(), place=P())
