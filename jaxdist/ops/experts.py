"""Experts of which each token takes some: its rows go to their experts, are multiplied in groups
and come back weighted. No expert has a capacity, so no token is dropped.

Rows are sorted by expert and each expert's are padded to whole blocks, so that a block's product
is with one expert's weight. CPUs loop over the blocks that there are, GPUs over as many as there
may be, for which their host need not ask. `lax.ragged_dot` serves TPUs only: on the others it is
made of dense products, of a copy of all rows for each expert.

Shapes: N = B * T tokens, D hidden size, E experts, F features of an expert, K experts a token
takes, P padded rows in blocks of Q.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxdist.ops.product import platform, product
from jaxdist.ops.row_blocks import rows_of_block

Weights = tuple[Array, Array, Array]  # gate [E, D, F], up [E, D, F], down [E, F, D]


def _dims(contract: tuple[tuple[int], tuple[int]], groups: list[int]) -> Any:
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contract, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=groups,
    )


# Rows in groups, [P, .]: times weights [E, D, F], which gives [P, F]; the same going back, which
# gives [P, D]; and rows times rows of the same group, which gives [E, D, F].
_OUT, _OF_ROWS = _dims(((1,), (1,)), [0]), _dims(((1,), (2,)), [0])
_OF_WEIGHTS = _dims(((0,), (0,)), [])


def routed_experts(
    x_BTD: Array,
    weights: Weights,
    chosen_BTK: Array,
    shares_BTK: Array,
    *,
    activation: Callable[[Array, Array], Array],
    compute_dtype: DTypeLike,
    first: Array | int = 0,
    grouped: Callable[..., Array] | None = None,
) -> Array:
    """Sum over a token's experts of share * down(activation(gate(x), up(x))), [B, T, D] fp32.

    `weights` are of the experts from number `first` on; what a token's other experts add is left
    to whoever holds them. `chosen` are the experts' numbers, `shares` their weights in fp32.
    `grouped` multiplies in place of `grouped_dot`, where weights are no arrays.
    """
    gate_EDF, up_EDF, down_EFD = weights
    x_ND, chosen_NK, shares_NK = (
        a.reshape(-1, a.shape[-1]) for a in (x_BTD, chosen_BTK, shares_BTK)
    )
    block = rows_of_block(chosen_NK.size, gate_EDF.shape[0], platform())
    groups, row_P, place_NK = _groups(chosen_NK - first, gate_EDF.shape[0], block)
    times = partial(grouped or grouped_dot, groups=groups, block=block, compute_dtype=compute_dtype)
    x_PD = x_ND.astype(compute_dtype).at[row_P].get(mode="fill", fill_value=0)
    y_PD = times(activation(times(x_PD, gate_EDF), times(x_PD, up_EDF)), down_EFD)
    y_NKD = y_PD.at[place_NK].get(mode="fill", fill_value=0)
    return _weighted_sum(y_NKD, shares_NK).reshape(x_BTD.shape)


@jax.custom_vjp
def _weighted_sum(y_NKD: Array, shares_NK: Array) -> Array:
    """Sum over K of share * y, [N, D] fp32. The backward pass keeps y as it is, not in fp32."""
    return (y_NKD.astype(jnp.float32) * shares_NK[..., None]).sum(axis=1)


def _weighted_forward(y_NKD: Array, shares_NK: Array) -> tuple[Array, tuple[Array, Array]]:
    return _weighted_sum(y_NKD, shares_NK), (y_NKD, shares_NK)


def _weighted_backward(kept: tuple[Array, Array], dout_ND: Array) -> tuple[Array, Array]:
    y_NKD, shares_NK = kept
    dout_N1D = dout_ND[:, None]
    dshares_NK = (dout_N1D * y_NKD.astype(jnp.float32)).sum(axis=-1)
    return (dout_N1D * shares_NK[..., None]).astype(y_NKD.dtype), dshares_NK


_weighted_sum.defvjp(_weighted_forward, _weighted_backward)


def _groups(expert_NK: Array, num_experts: int, block: int) -> tuple[Array, Array, Array]:
    """Rows of each expert, padding included, [E]; each row's token [P]; each choice's row [N, K].

    Choices of experts outside of [0, E) have row P, padding has token N: both are out of bounds.
    """
    num_tokens, num_choices = expert_NK.shape
    size = num_tokens * num_choices
    num_rows = (size // block + num_experts) * block
    expert_M = expert_NK.reshape(-1)
    expert_M = jnp.where((expert_M >= 0) & (expert_M < num_experts), expert_M, num_experts)
    order_M = jnp.argsort(expert_M, stable=True)
    counts_E = jnp.bincount(expert_M, length=num_experts + 1)
    padded_E = -(-counts_E[:num_experts] // block) * block
    # Where an expert's rows begin, among the sorted choices and among the padded rows.
    begin_E = jnp.cumsum(counts_E) - counts_E
    padded_begin_E = jnp.append(jnp.cumsum(padded_E) - padded_E, num_rows)
    sorted_M = expert_M[order_M]
    row_M = padded_begin_E[sorted_M] + jnp.arange(size) - begin_E[sorted_M]
    row_M = jnp.where(sorted_M < num_experts, row_M, num_rows).astype(jnp.int32)
    place_NK = jnp.zeros_like(row_M).at[order_M].set(row_M).reshape(expert_NK.shape)
    no_token_P = jnp.full(num_rows, num_tokens, jnp.int32)
    row_P = no_token_P.at[row_M].set((order_M // num_choices).astype(jnp.int32), mode="drop")
    return padded_E.astype(jnp.int32), row_P, place_NK


def grouped_dot(
    x_PD: Array, w_EDF: Array, *, groups: Array, block: int, compute_dtype: DTypeLike
) -> Array:
    """x's rows times the weight of their group, [P, F] in `compute_dtype`, accumulated in fp32.

    `groups` [E] are the groups' sizes, multiples of `block`; rows after them become zeros.
    """
    if block == 1:
        return _ragged_dot(x_PD, w_EDF, groups, compute_dtype)
    return _looped_dot(x_PD, w_EDF, groups, block, compute_dtype)


def over_blocks(
    num_rows: int, groups_E: Array, block: int, body: Callable[[Array, Array, Any], Any], start: Any
) -> Any:
    """`body(index, expert, carry)` for each block of the groups; on GPUs for those of no group too.

    A loop whose length only the device knows would have a GPU's host wait for it at every turn.
    The expert of a block of no group is out of bounds, and counts as the last where one is read.
    """
    ends_E = jnp.cumsum(groups_E) // block
    index = jnp.arange(num_rows // block)
    owners = (index[:, None] >= ends_E[None, :]).sum(axis=1)
    count = ends_E[-1] if platform() == "cpu" else len(owners)
    return lax.fori_loop(0, count, lambda index, carry: body(index, owners[index], carry), start)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ragged_dot(x_PD: Array, w_EDF: Array, groups_E: Array, compute_dtype: DTypeLike) -> Array:
    """Like `ops.dot`: no copy of the weights is kept, their gradient stays as accumulated.

    Autodiff would keep them in the compute dtype, widen the cotangent to fp32 for both products of
    the backward pass, and round the weights' gradient.
    """
    return _ragged(_OUT, x_PD, w_EDF, groups_E, compute_dtype).astype(compute_dtype)


def _ragged_forward(x_PD: Array, w_EDF: Array, groups_E: Array, compute_dtype: DTypeLike):
    return _ragged_dot(x_PD, w_EDF, groups_E, compute_dtype), (x_PD, w_EDF, groups_E)


def _ragged_backward(compute_dtype: DTypeLike, kept: tuple[Array, ...], dout_PF: Array):
    x_PD, w_EDF, groups_E = kept
    dx_PD = _ragged(_OF_ROWS, dout_PF, w_EDF, groups_E, compute_dtype)
    dw_EDF = _ragged(_OF_WEIGHTS, x_PD, dout_PF, groups_E, compute_dtype)
    return dx_PD.astype(x_PD.dtype), dw_EDF.astype(w_EDF.dtype), None


_ragged_dot.defvjp(_ragged_forward, _ragged_backward)


def _ragged(dims: Any, a: Array, b: Array, groups_E: Array, compute_dtype: DTypeLike) -> Array:
    """One of the three products, in `compute_dtype` with an fp32 result."""
    a, b = a.astype(compute_dtype), b.astype(compute_dtype)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.ragged_dot_general(
        a, b, groups_E, dims, precision=precision, preferred_element_type=jnp.float32
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _looped_dot(
    x_PD: Array, w_EDF: Array, groups_E: Array, block: int, compute_dtype: DTypeLike
) -> Array:
    w_EDF = _ready(w_EDF, compute_dtype)

    def body(index: Array, expert: Array, out_PF: Array) -> Array:
        x_QD = _rows(x_PD, index * block, block, expert < len(w_EDF))
        w_DF = lax.dynamic_index_in_dim(w_EDF, expert, keepdims=False)
        out_QF = product(x_QD, w_DF, ((1,), (0,)), compute_dtype=compute_dtype)
        return lax.dynamic_update_slice_in_dim(
            out_PF, out_QF.astype(compute_dtype), index * block, 0
        )

    start = _zeros((x_PD.shape[0], w_EDF.shape[2]), compute_dtype, x_PD, w_EDF)
    return over_blocks(x_PD.shape[0], groups_E, block, body, start)


def _looped_forward(x_PD: Array, w_EDF: Array, groups_E: Array, *static):
    return _looped_dot(x_PD, w_EDF, groups_E, *static), (x_PD, w_EDF, groups_E)


def _looped_backward(block: int, compute_dtype: DTypeLike, kept, dout_PF: Array):
    x_PD, master_EDF, groups_E = kept
    w_EDF = _ready(master_EDF, compute_dtype)

    def body(index: Array, expert: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dx_PD, dw_EDF = carry
        x_QD = _rows(x_PD, index * block, block, expert < len(w_EDF))
        dout_QF = _rows(dout_PF, index * block, block, expert < len(w_EDF))
        w_DF, before_DF = (
            lax.dynamic_index_in_dim(a, expert, keepdims=False) for a in (w_EDF, dw_EDF)
        )
        dx_QD = product(dout_QF, w_DF, ((1,), (1,)), compute_dtype=compute_dtype)
        dw_DF = product(x_QD, dout_QF, ((0,), (0,)), compute_dtype=compute_dtype)
        dx_PD = lax.dynamic_update_slice_in_dim(dx_PD, dx_QD.astype(x_PD.dtype), index * block, 0)
        dw_EDF = lax.dynamic_update_index_in_dim(dw_EDF, before_DF + dw_DF, expert, 0)
        return dx_PD, dw_EDF

    start = (
        _zeros(x_PD.shape, x_PD.dtype, w_EDF, dout_PF),
        _zeros(w_EDF.shape, jnp.float32, x_PD, dout_PF),
    )
    dx_PD, dw_EDF = over_blocks(x_PD.shape[0], groups_E, block, body, start)
    return dx_PD, dw_EDF.astype(master_EDF.dtype), None


def _rows(a_PD: Array, start: Array, count: int, belong: Array) -> Array:
    """`count` rows; zeros where they `belong` to no group."""
    a_QD = lax.dynamic_slice_in_dim(a_PD, start, count)
    return jnp.where(belong, a_QD, jnp.zeros((), a_QD.dtype))


def _ready(w_EDF: Array, compute_dtype: DTypeLike) -> Array:
    """The weights as GPUs multiply them: cast once and not for each block."""
    return w_EDF if platform() == "cpu" else w_EDF.astype(compute_dtype)


_looped_dot.defvjp(_looped_forward, _looped_backward)


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, *like: Array) -> Array:
    """Zeros that vary over the mesh axes over which any of `like` does."""
    never = jnp.zeros((), bool)
    zero = jnp.float32(0)
    for a in like:
        zero += jnp.where(never, a.ravel()[0].astype(jnp.float32), 0.0)
    return jnp.broadcast_to(zero.astype(dtype), shape)
