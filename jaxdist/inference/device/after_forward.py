"""What follows the forward pass: tokens, the log-probabilities of a prompt, hidden states.

Shapes: D replicas, B rows of each, T queries, X scored ones, W blocks, V vocabulary, E hidden size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.inference.sampling.sampler import Logprobs, Sampled, sample, token_logprobs
from jaxdist.inference.sampling.sampler_state import SamplerState
from jaxdist.models.layers import Context

TOP = 20  # log-probabilities of so many of the likeliest tokens are told, where any are


@partial(jax.jit, static_argnames=("mesh", "vocab_size", "plain", "top"), donate_argnames="state")
def sample_step(
    logits_BXV: Array,
    state: SamplerState,
    rows: Array,
    masks: Array | None,
    *,
    mesh: Mesh,
    vocab_size: int,
    plain: bool,
    top: int | None,
) -> tuple[Sampled, SamplerState]:
    """`sampler.sample` in each replica, for its own rows and slots.

    Members of tp share the work, where they share the columns.
    """
    num_members = mesh.shape["tp"]
    columns_over = "tp" if num_members > 1 and logits_BXV.shape[2] % num_members == 0 else None

    def replica(logits_BXV: Array, state: SamplerState, rows: Array, masks: Array | None) -> Any:
        return sample(
            logits_BXV,
            state,
            rows,
            masks,
            vocab_size=vocab_size,
            plain=plain,
            columns_over=columns_over,
            top_logprobs=top,
            by_row=mesh.devices.flat[0].platform == "cpu",
        )

    return jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(P("dp", None, columns_over), P("dp"), P("dp"), P("dp")),
        out_specs=P("dp"),
        check_vma=False,
    )(logits_BXV, state, rows, masks)


def with_more_rows(arrays: Sequence[Any], num_replicas: int, num_rows: int) -> list[Any]:
    """Arrays [D * B, ...] as [D * num_rows, ...], zeros after each replica's own; numpy or JAX."""
    wider = []
    for array in arrays:
        own = array.reshape(num_replicas, -1, *array.shape[1:])
        more = [(0, 0), (0, num_rows - own.shape[1]), *[(0, 0)] * (own.ndim - 2)]
        pad = np.pad if isinstance(array, np.ndarray) else jnp.pad
        wider.append(pad(own, more).reshape(-1, *array.shape[1:]))
    return wider


def prompt_logprobs(
    rest: Any, x_BTE: Array, row: Array, next_tokens: Array, *, ctx: Context, vocab_size: int
) -> Logprobs:
    """Of the tokens [T] that follow those of one row, [T, ...]."""
    x_1TE = jax.lax.dynamic_slice_in_dim(x_BTE, row, 1)
    logits_TV = rest.logits(x_1TE, ctx)[0]
    return token_logprobs(logits_TV, next_tokens, vocab_size=vocab_size, top=TOP)


@jax.jit
def hidden_states(norm: Any, x_BTE: Array, row: Array) -> Array:
    """After the final norm, of one row, [T, E] fp32."""
    return norm(jax.lax.dynamic_slice_in_dim(x_BTE, row, 1))[0].astype(jnp.float32)
