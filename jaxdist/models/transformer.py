"""The decoder: embedding, a scan over stacked blocks, final norm and head.

Shapes: B batch rows, T tokens, D hidden size, V vocabulary, Vp vocabulary with padding rows,
L layers.

Training runs the blocks through `parallel/pipeline.py`; `Transformer.__call__` is the plain
forward that it must equal, and what naive generation runs.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdist.config import ModelConfig
from jaxdist.models.attention import Attention
from jaxdist.models.latent_attention import LatentAttention
from jaxdist.models.layers import NORMS, Cache, Context, Initializer, is_per_layer
from jaxdist.models.mlp import MLP
from jaxdist.models.moe import MoE
from jaxdist.models.remat import rematerialised
from jaxdist.ops.attention import causal_attention
from jaxdist.ops.dot import dot
from jaxdist.ops.product import product
from jaxdist.ops.rope import Rope, layer_rope, rope_table


class Block(nnx.Module):
    """One layer: attention, then MLP or experts, each added to x; norms as `norm_order` says.

    The norms' names are Hugging Face's: what comes before the MLP is called
    post_attention_layernorm where it is the only one between the two.
    """

    def __init__(
        self, config: ModelConfig, *, key: jax.Array, init: Initializer, dense: bool = False
    ):
        norm = partial(NORMS[config.norm], config.hidden_size, config.rms_norm_eps, init=init)
        attention_key, mlp_key = jax.random.split(key)
        order = config.norm_order
        attention = LatentAttention if config.kv_lora_rank else Attention
        feed_forward = MoE if config.num_experts and not dense else MLP
        self.input_layernorm = norm() if order != "post" else None
        self.self_attn = attention(config, key=attention_key, init=init)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if order == "sandwich" else None
        self.mlp = feed_forward(config, key=mlp_key, init=init)
        self.post_feedforward_layernorm = norm() if order != "pre" else None

    def __call__(
        self,
        x_BTD: jax.Array,
        rope: Rope,
        ctx: Context,
        cache: Cache = None,
        is_local: bool | jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """The residual stream after this layer, and the cache.

        is_local: whether it attends to the sliding window only, in models where layers differ.
        """
        x_BTD, cache, _ = self.with_router(x_BTD, rope, ctx, cache, is_local)
        return x_BTD, cache

    def with_router(
        self,
        x_BTD: jax.Array,
        rope: Rope,
        ctx: Context,
        cache: Cache = None,
        is_local: bool | jax.Array | None = None,
    ) -> tuple[jax.Array, Cache, jax.Array | None]:
        """As `__call__`, and the router's logits [B, T, E], None where there is no router."""
        # The residual stream and its norms may be sharded over the sequence; the products that
        # leave it and join it again change that to heads and features, and back.
        residual = ("batch", "sequence", "embed")
        h_BTD = x_BTD if self.input_layernorm is None else self.input_layernorm(x_BTD)
        h_BTD, cache = self.self_attn(h_BTD, layer_rope(rope, is_local), ctx, cache, is_local)
        between, after = self.post_attention_layernorm, self.post_feedforward_layernorm
        if after is not None:
            h_BTD, between = between(h_BTD), self.pre_feedforward_layernorm
        x_BTD = ctx.constrain(x_BTD + h_BTD, residual)
        h_BTD = x_BTD if between is None else between(x_BTD)
        router_BTE = None
        if isinstance(self.mlp, MoE):
            h_BTD, router_BTE = self.mlp(h_BTD, ctx)
        else:
            h_BTD = self.mlp(h_BTD, ctx)
        h_BTD = h_BTD if after is None else after(h_BTD)
        return ctx.constrain(x_BTD + h_BTD, residual), cache, router_BTE


class Transformer(nnx.Module):
    """The whole model. `layers` is one Block whose leaves are stacked, [L, ...].

    Where the first blocks are dense in spite of experts, `dense_layers` is their stack.
    """

    def __init__(
        self, config: ModelConfig, *, key: jax.Array, param_dtype: DTypeLike = jnp.float32
    ):
        init = Initializer(std=config.initializer_range, dtype=param_dtype)
        table, axes = (config.padded_vocab_size, config.hidden_size), ("vocab", "embed")
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        num_dense = config.first_k_dense_replace
        stack = partial(_stacked_blocks, config, init=init)
        self.config = config
        self.embed_tokens = init.normal(embed_key, table, axes)
        learned = config.position_embedding == "learned"
        positions = (config.max_position_embeddings, config.hidden_size)
        key = jax.random.fold_in(embed_key, 1)
        self.embed_positions = (
            init.normal(key, positions, ("positions", "embed")) if learned else None
        )
        key = jax.random.fold_in(layers_key, 1)
        self.dense_layers = stack(num_dense, key=key, dense=True) if num_dense else None
        self.layers = stack(config.num_hidden_layers - num_dense, key=layers_key)
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
        return self.with_router(tokens_BT, positions_BT, segment_ids_BT, ctx, remat)[0]

    def with_router(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None = None,
        ctx: Context | None = None,
        remat: str = "none",
    ) -> tuple[jax.Array, jax.Array | None]:
        """As `__call__`, and the routers' logits [L, B, T, E], None where there is none."""
        if ctx is None:
            ctx = default_context(self.config, segment_ids_BT)
        rope = rope_table(self.config, positions_BT)
        x_BTD = self.embed(tokens_BT, ctx, positions_BT)
        x_BTD, _, router_LBTE = self._scan(x_BTD, rope, ctx, None, remat)
        return self.logits(x_BTD, ctx), router_LBTE

    def embed(
        self, tokens_BT: jax.Array, ctx: Context, positions_BT: jax.Array | None = None
    ) -> jax.Array:
        """The residual stream's start, [B, T, D]; learned positions need `positions`."""
        x_BTD = self.embed_tokens[...][tokens_BT].astype(ctx.compute_dtype)
        x_BTD = scaled_embedding(self.config, x_BTD)
        if self.embed_positions is not None:
            assert positions_BT is not None
            x_BTD = x_BTD + self.embed_positions[...][positions_BT].astype(ctx.compute_dtype)
        return ctx.constrain(x_BTD, ("batch", "sequence", "embed"))

    def apply_layers(
        self, x_BTD: jax.Array, rope: Rope, ctx: Context, cache: Cache = None, remat: str = "none"
    ) -> tuple[jax.Array, Cache]:
        """All blocks in turn; each leaf of `cache` is [L, ...], one slice a layer."""
        x_BTD, cache, _ = self._scan(x_BTD, rope, ctx, cache, remat)
        return x_BTD, cache

    def _scan(
        self, x_BTD: jax.Array, rope: Rope, ctx: Context, cache: Cache, remat: str
    ) -> tuple[jax.Array, Cache, jax.Array | None]:
        config = self.config
        local = [config.is_local(layer) for layer in range(config.num_hidden_layers)]
        local_L = jnp.array(local) if config.sliding_window_pattern else None

        @partial(rematerialised, remat=remat)
        def layer(x_BTD: jax.Array, xs: tuple[Block, Cache, jax.Array | None]):
            block, layer_cache, is_local = xs
            x_BTD, *outs = block.with_router(x_BTD, rope, ctx, layer_cache, is_local)
            return x_BTD, tuple(outs)

        if any(map(is_per_layer, jax.tree.leaves(self.layers, is_leaf=is_per_layer))):
            made = []
            for number in range(config.num_hidden_layers):
                xs = _layer_at((self.layers, cache, local_L), number)
                x_BTD, own = layer(x_BTD, xs)
                made.append(own)
            return x_BTD, *jax.tree.map(lambda *outs: jnp.stack(outs), *made)
        if self.dense_layers is None:
            x_BTD, outs = jax.lax.scan(layer, x_BTD, (self.layers, cache, local_L))
            return x_BTD, *outs
        first = config.first_k_dense_replace
        before, after = (
            jax.tree.map(lambda a, own=own: a[own], (cache, local_L))
            for own in (slice(None, first), slice(first, None))
        )
        x_BTD, (cache, _) = jax.lax.scan(layer, x_BTD, (self.dense_layers, *before))
        x_BTD, (more, router_LBTE) = jax.lax.scan(layer, x_BTD, (self.layers, *after))
        cache = jax.tree.map(lambda *parts: jnp.concatenate(parts), cache, more)
        return x_BTD, cache, router_LBTE

    def logits(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """Final norm and head; fp32, the padding rows of the vocabulary cut off."""
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        head = ctx.head or partial(product, contract=((2,), (1,)), compute_dtype=ctx.compute_dtype)
        logits_BTV = head(self.norm(x_BTD), table[...])
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits_BTV = cap * jnp.tanh(logits_BTV / cap)
        return logits_BTV[..., : self.config.vocab_size]


def scaled_embedding(config: ModelConfig, x_BTD: jax.Array) -> jax.Array:
    """Embeddings times the root of their width, where the model asks for it.

    The root is rounded to the dtype of x first, as in the models that were trained so.
    """
    if not config.scale_embeddings:
        return x_BTD
    return x_BTD * jnp.asarray(config.hidden_size**0.5, x_BTD.dtype)


def default_context(
    config: ModelConfig,
    segment_ids_BT: jax.Array | None = None,
    compute_dtype: DTypeLike = jnp.float32,
) -> Context:
    """One device, no cache: causal attention within each segment of a row."""

    def attend(
        q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: Cache, **scores: Any
    ) -> tuple[jax.Array, Cache]:
        out_BTNH = causal_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            segment_ids=segment_ids_BT,
            sliding_window=config.sliding_window,
            **scores,
        )
        return out_BTNH, cache

    return Context(
        dot=partial(dot, compute_dtype=compute_dtype), attend=attend, compute_dtype=compute_dtype
    )


def _layer_at(stack: Any, number: int) -> Any:
    """One layer of a tree of stacks."""
    return jax.tree.map(
        lambda leaf: leaf.layers[number] if is_per_layer(leaf) else leaf[number],
        stack,
        is_leaf=is_per_layer,
    )


def _stacked_blocks(
    config: ModelConfig, count: int, *, key: jax.Array, init: Initializer, dense: bool = False
) -> Block:
    keys = jax.random.split(key, count)
    blocks = jax.vmap(lambda layer_key: Block(config, key=layer_key, init=init, dense=dense))(keys)
    # vmap stacks the arrays and leaves the metadata as it was.
    return jax.tree.map(
        lambda param: param.replace(axes=("layers", *param.axes)),
        blocks,
        is_leaf=lambda node: isinstance(node, nnx.Param),
    )
