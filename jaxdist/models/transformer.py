"""The decoder: embedding, a scan over stacked blocks, final norm and head.

Shapes: B batch rows, T tokens, D hidden size, V vocabulary, Vp vocabulary with padding rows,
L layers.

Training runs the blocks through `parallel/pipeline.py`; `Transformer.__call__` is the plain
forward that it must equal, and what naive generation runs.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdist.config import ModelConfig
from jaxdist.models.attention import Attention
from jaxdist.models.layers import NORMS, Cache, Context, Initializer
from jaxdist.models.mlp import MLP
from jaxdist.models.remat import rematerialised
from jaxdist.ops.attention import causal_attention
from jaxdist.ops.dot import dot
from jaxdist.ops.product import product
from jaxdist.ops.rope import Rope, rope_table


class Block(nnx.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, key: jax.Array, init: Initializer):
        norm = partial(NORMS[config.norm], config.hidden_size, config.rms_norm_eps, init=init)
        attention_key, mlp_key = jax.random.split(key)
        self.input_layernorm = norm()
        self.self_attn = Attention(config, key=attention_key, init=init)
        self.post_attention_layernorm = norm()
        self.mlp = MLP(config, key=mlp_key, init=init)

    def __call__(
        self, x_BTD: jax.Array, rope: Rope, ctx: Context, cache: Cache = None
    ) -> tuple[jax.Array, Cache]:
        # The residual stream and its norms may be sharded over the sequence; the products that
        # leave it and join it again change that to heads and features, and back.
        residual = ("batch", "sequence", "embed")
        h_BTD, cache = self.self_attn(self.input_layernorm(x_BTD), rope, ctx, cache)
        x_BTD = ctx.constrain(x_BTD + h_BTD, residual)
        h_BTD = self.mlp(self.post_attention_layernorm(x_BTD), ctx)
        return ctx.constrain(x_BTD + h_BTD, residual), cache


class Transformer(nnx.Module):
    """The whole model. `layers` is one Block whose leaves are stacked, [L, ...]."""

    def __init__(
        self, config: ModelConfig, *, key: jax.Array, param_dtype: DTypeLike = jnp.float32
    ):
        init = Initializer(std=config.initializer_range, dtype=param_dtype)
        table, axes = (config.padded_vocab_size, config.hidden_size), ("vocab", "embed")
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.config = config
        self.embed_tokens = init.normal(embed_key, table, axes)
        self.layers = _stacked_blocks(config, key=layers_key, init=init)
        self.norm = NORMS[config.norm](config.hidden_size, config.rms_norm_eps, init=init)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else init.normal(head_key, table, axes)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None = None,
        ctx: Context | None = None,
        remat: str = "none",
    ) -> jax.Array:
        """Logits [B, T, V] in fp32. A given `ctx` brings its own attention and segment ids."""
        if ctx is None:
            ctx = default_context(self.config, segment_ids_BT)
        rope = rope_table(self.config, positions_BT)
        x_BTD, _ = self.apply_layers(self.embed(tokens_BT, ctx), rope, ctx, remat=remat)
        return self.logits(x_BTD, ctx)

    def embed(self, tokens_BT: jax.Array, ctx: Context) -> jax.Array:
        """The residual stream's start, [B, T, D]."""
        x_BTD = self.embed_tokens[...][tokens_BT].astype(ctx.compute_dtype)
        return ctx.constrain(x_BTD, ("batch", "sequence", "embed"))

    def apply_layers(
        self, x_BTD: jax.Array, rope: Rope, ctx: Context, cache: Cache = None, remat: str = "none"
    ) -> tuple[jax.Array, Cache]:
        """All blocks in turn; each leaf of `cache` is [L, ...], one slice a layer."""

        @partial(rematerialised, remat=remat)
        def layer(x_BTD: jax.Array, xs: tuple[Block, Cache]) -> tuple[jax.Array, Cache]:
            block, layer_cache = xs
            return block(x_BTD, rope, ctx, layer_cache)

        return jax.lax.scan(layer, x_BTD, (self.layers, cache))

    def logits(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """Final norm and head; fp32, the padding rows of the vocabulary cut off."""
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        logits_BTV = product(
            self.norm(x_BTD), table[...], ((2,), (1,)), compute_dtype=ctx.compute_dtype
        )
        return logits_BTV[..., : self.config.vocab_size]


def default_context(
    config: ModelConfig,
    segment_ids_BT: jax.Array | None = None,
    compute_dtype: DTypeLike = jnp.float32,
) -> Context:
    """One device, no cache: causal attention within each segment of a row."""

    def attend(
        q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        window = config.sliding_window
        out_BTNH = causal_attention(
            q_BTNH, k_BTKH, v_BTKH, segment_ids=segment_ids_BT, sliding_window=window
        )
        return out_BTNH, cache

    return Context(
        dot=partial(dot, compute_dtype=compute_dtype), attend=attend, compute_dtype=compute_dtype
    )


def _stacked_blocks(config: ModelConfig, *, key: jax.Array, init: Initializer) -> Block:
    keys = jax.random.split(key, config.num_hidden_layers)
    blocks = jax.vmap(lambda layer_key: Block(config, key=layer_key, init=init))(keys)
    # vmap stacks the arrays and leaves the metadata as it was.
    return jax.tree.map(
        lambda param: param.replace(axes=("layers", *param.axes)),
        blocks,
        is_leaf=lambda node: isinstance(node, nnx.Param),
    )
