"""Generation with one dense key/value cache and one sequence: the plain way, to be compared with.

Shapes: B = 1 sequence, T tokens of a step, S cache slots, D hidden size, N query heads,
K key/value heads, H head dim, V vocabulary, L layers.

`generate` runs the training model's own blocks; only their attention is another. Each token it
yields is the one that `Transformer.__call__` on the whole text so far would give.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdist.config import ModelConfig, UsageError, limits
from jaxdist.models.layers import Cache, Context
from jaxdist.models.transformer import Transformer
from jaxdist.ops.attention import attention_mask, masked_attention
from jaxdist.ops.rope import rope_table
from jaxdist.quantization.gguf_blocks import dot_of_either


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: Divides the logits; 0 takes the likeliest token.
        seed: With the text and the position, all that a sampled token depends on.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self):
        limits.whole("max-tokens", self.max_tokens, 1)
        limits.number("temperature", self.temperature, 0)
        limits.whole("seed", self.seed, 0, 2**32 - 1)


def check_prompt(config: ModelConfig, prompt: Sequence[int], max_tokens: int) -> None:
    """Raises UsageError where `max_tokens` cannot follow `prompt`, with the fix."""
    limit = config.max_sequence_length
    if not prompt:
        raise UsageError("the prompt has no tokens; give at least one")
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        raise UsageError(
            f"the prompt's token ids reach from {min(prompt)} to {max(prompt)}; "
            f"the model's vocabulary has 0 to {config.vocab_size - 1}"
        )
    if len(prompt) >= limit:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens and the model's context {limit}; "
            f"shorten it to at most {limit - 1}"
        )
    if len(prompt) + max_tokens > limit:
        raise UsageError(
            f"the prompt's {len(prompt)} tokens and max-tokens={max_tokens} exceed the model's "
            f"context of {limit}; set max-tokens to at most {limit - len(prompt)}"
        )


def generate(
    model: Transformer,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    eos_ids: Collection[int] = (),
    vocab_size: int | None = None,
    compute_dtype: DTypeLike = jnp.float32,
) -> Iterator[int]:
    """The ids that continue `prompt`, one at a time, ending before any of `eos_ids`.

    vocab_size: the tokenizer's, where it is smaller than the model's; no id beyond it is given.
    """
    check_prompt(model.config, prompt, sampling.max_tokens)
    text = list(prompt)
    num_slots = len(text) + sampling.max_tokens
    key, cache = jax.random.key(sampling.seed), None
    while len(text) < num_slots:
        if cache is None or _old_rotations_are_void(model.config, len(text)):
            # All slots at once: one compilation, whatever the prompt's length.
            cache = _empty_cache(model.config, num_slots, compute_dtype)
            new, first = text + [0] * (num_slots - len(text)), 0
        else:
            new, first = text[-1:], len(text) - 1
        logits_V, cache = _step(
            model, cache, jnp.array([new]), first, len(text) - first, compute_dtype=compute_dtype
        )
        token_key = jax.random.fold_in(key, len(text))
        token = int(sample(logits_V[:vocab_size], sampling.temperature, token_key))
        if token in eos_ids:
            return
        text.append(token)
        yield token


@partial(jax.jit, static_argnames="temperature")
def sample(logits_V: jax.Array, temperature: float, key: jax.Array) -> jax.Array:
    """One id, by one uniform number through the inverse of the cumulated probabilities."""
    if temperature == 0:
        return jnp.argmax(logits_V)
    cumulated_V = jnp.cumsum(jax.nn.softmax((logits_V - jnp.max(logits_V)) / temperature))
    return jnp.argmax(cumulated_V > jax.random.uniform(key) * cumulated_V[-1])


@partial(jax.jit, static_argnames="compute_dtype", donate_argnames="cache")
def _step(
    model: Transformer,
    cache: Cache,
    tokens_BT: jax.Array,
    first: int | jax.Array,
    count: int | jax.Array,
    *,
    compute_dtype: DTypeLike,
) -> tuple[jax.Array, Cache]:
    """Puts `count` tokens, at slots `first` on, through the model; the rest of T is filler.

    Returns the logits [V] after the last of them, and the cache. Filler comes later than all
    that is asked for, so it is never attended to, and its slots are written again by the tokens
    that come there.
    """
    index_BT = jnp.arange(tokens_BT.shape[1])[None, :]
    ctx = _context(model.config, first + index_BT, compute_dtype)
    # The largest position counts for some rope scalings: filler must not exceed the text.
    rope = rope_table(model.config, first + jnp.minimum(index_BT, count - 1))
    positions_BT = jnp.minimum(first + index_BT, model.config.max_sequence_length - 1)
    x_BTD = model.embed(tokens_BT, ctx, positions_BT)
    x_BTD, cache = model.apply_layers(x_BTD, rope, ctx, cache)
    last_BTD = jax.lax.dynamic_slice_in_dim(x_BTD, count - 1, 1, axis=1)
    return model.logits(last_BTD, ctx)[0, 0], cache


def _context(config: ModelConfig, slots_BT: jax.Array, compute_dtype: DTypeLike) -> Context:
    """Attention of the tokens in these slots to all slots up to theirs."""

    def attend(
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        cache: Cache,
        *,
        is_local: jax.Array | None = None,
        **scores: Any,
    ) -> tuple[jax.Array, Cache]:
        first = slots_BT[0, 0]
        k_BSKH, v_BSKH = (
            jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=1)
            for old, new in zip(cache, (k_BTKH, v_BTKH), strict=True)
        )
        all_BS = jnp.arange(k_BSKH.shape[1])[None, :]
        mask_BTS = attention_mask(
            slots_BT, all_BS, sliding_window=config.sliding_window, is_local=is_local
        )
        return masked_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, **scores), (k_BSKH, v_BSKH)

    return Context(
        dot=partial(dot_of_either, compute_dtype=compute_dtype),
        attend=attend,
        compute_dtype=compute_dtype,
    )


def _empty_cache(config: ModelConfig, num_slots: int, dtype: DTypeLike) -> Cache:
    """Keys and values, each [L, B, S, K, H]."""
    shape = (config.num_hidden_layers, 1, num_slots, config.num_key_value_heads)
    return tuple(jnp.zeros((*shape, d), dtype) for d in (config.head_dim, config.value_dim))


def _old_rotations_are_void(config: ModelConfig, length: int) -> bool:
    """Whether growing to `length` tokens changes the rotation of the keys before."""
    scaling = config.rope_scaling or {}
    match scaling.get("rope_type"):
        case "dynamic":
            return length > config.max_position_embeddings
        case "longrope":
            original = scaling.get("original_max_position_embeddings")
            return length == (original or config.max_position_embeddings) + 1
    return False
