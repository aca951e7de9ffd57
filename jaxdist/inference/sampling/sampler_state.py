"""What the sampler keeps on the device about each running sequence, by slot.

Shapes: S slots, V columns of the logits, W = words(V) words of 32 allowed-or-not bits.

A slot is written whole when a sequence enters it and left as it is when the sequence goes: no row
of a step names it then. Every write has the same shapes, so it compiles once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.inference.sampling.sampling_params import LOGIT_BIASES, SamplingParams

LANES = 128  # columns are worked on in groups of as many
# Columns of `numbers` and `whole`.
TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, PRESENCE, FREQUENCY = range(7)
ALL = 2**31 - 1  # top_k that leaves none out
TOP_K, MIN_TOKENS, PROMPT_LENGTH, DEAD_END, NUM_BIASES, SEED, SEED_LOW = range(7)


class SamplerState(NamedTuple):
    """Parameters and history of each slot; of one slot, without S, when it is written."""

    numbers: jax.Array  # f32 [S, 7]
    whole: jax.Array  # int32 [S, 7]
    bias_ids: jax.Array  # int32 [S, LOGIT_BIASES], V where there is none
    biases: jax.Array  # f32 [S, LOGIT_BIASES]
    allowed: jax.Array  # uint32 [S, W], no bit for padding columns
    enders: jax.Array  # uint32 [S, W], end-of-sequence and stop tokens
    prompt: jax.Array  # uint32 [S, W], tokens that are in the prompt
    counts: jax.Array  # int32 [S, V], times that a token is in the output
    last: jax.Array  # int32 [S], what was sampled last


def words(num_columns: int) -> int:
    """Words of 32 bits that hold one bit a column, whole groups of columns."""
    return -(-num_columns // LANES) * (LANES // 32)


def empty_state(num_slots: int, num_columns: int) -> SamplerState:
    """A state with nothing in it. Logits have `num_columns` = V columns, padding included."""
    fields = jax.eval_shape(lambda: _blank(num_columns))
    return jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), fields)


def slot_state(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int] = (),
    *,
    eos_ids: Sequence[int],
    vocab_size: int,
    num_columns: int,
) -> SamplerState:
    """What a sequence's slot holds, as arrays of the host.

    params: `seed` is set; ids were checked (`SamplingParams.check_against`).
    output_ids: What was generated before, when a preempted sequence comes back.
    eos_ids: The model's end-of-sequence tokens.
    """
    one = _blank(num_columns)
    greedy = is_greedy(params)
    one.numbers[:] = (
        0.0 if greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.typical_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    seed = (params.seed or 0) % 2**64
    whole = (
        params.top_k if 0 < params.top_k < num_columns else ALL,
        params.min_tokens,
        len(prompt_ids),
        eos_ids[0] if eos_ids else 0,
        len(params.logit_bias or ()),
        seed >> 32,
        seed % 2**32,
    )
    one.whole[:] = np.array(whole, np.uint32).view(np.int32)
    for i, (token, bias) in enumerate((params.logit_bias or {}).items()):
        one.bias_ids[i], one.biases[i] = token, bias
    ids = params.allowed_token_ids
    one.allowed[:] = bits(np.arange(vocab_size) if ids is None else ids, num_columns)
    one.enders[:] = bits((*eos_ids, *params.stop_token_ids), num_columns)
    one.prompt[:] = bits(prompt_ids, num_columns)
    if len(output_ids):
        one.counts[:] = np.bincount(output_ids, minlength=num_columns)
    last = (output_ids if len(output_ids) else prompt_ids)[-1]
    return one._replace(last=np.int32(last))


def is_greedy(params: SamplingParams) -> bool:
    """Whether the likeliest token is taken."""
    return params.temperature == 0 or params.top_k == 1


def is_plain(params: SamplingParams) -> bool:
    """Whether the likeliest token of the raw logits is taken: nothing changes them."""
    return (
        is_greedy(params)
        and params.repetition_penalty == 1
        and params.presence_penalty == params.frequency_penalty == params.min_tokens == 0
        and not params.logit_bias
        and params.allowed_token_ids is None
    )


def bits(ids: Sequence[int] | np.ndarray, num_columns: int) -> np.ndarray:
    """uint32 [W]: bit i of word w is set for column 32 w + i."""
    flags = np.zeros(words(num_columns) * 32, np.uint8)
    flags[np.asarray(ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<u4")


@partial(jax.jit, donate_argnames="state")
def start_slot(state: SamplerState, slot: jax.Array | int, one: SamplerState) -> SamplerState:
    """`state` with `one` in `slot`."""
    return jax.tree.map(lambda all_slots, new: all_slots.at[slot].set(new), state, one)


def _blank(num_columns: int) -> SamplerState:
    num_words = words(num_columns)
    arrays: dict[str, Any] = {  # of the host
        "numbers": np.zeros(7, np.float32),
        "whole": np.zeros(7, np.int32),
        "bias_ids": np.full(LOGIT_BIASES, num_columns, np.int32),
        "biases": np.zeros(LOGIT_BIASES, np.float32),
        "allowed": np.zeros(num_words, np.uint32),
        "enders": np.zeros(num_words, np.uint32),
        "prompt": np.zeros(num_words, np.uint32),
        "counts": np.zeros(num_columns, np.int32),
        "last": np.int32(0),
    }
    return SamplerState(**arrays)
