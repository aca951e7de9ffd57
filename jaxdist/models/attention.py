"""Self-attention with grouped heads; the attention itself is the caller's `ctx.attend`.

Shapes: B batch rows, T tokens, D hidden size, N query heads, K key/value heads (N = K * G),
H head dim, E = N * H or K * H.
"""

from functools import partial

import jax
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxdist.config import ModelConfig
from jaxdist.models.layers import Cache, Context, Initializer, Linear, RMSNorm, RMSNorm1p
from jaxdist.ops.rope import Rope, apply_rope


class Attention(nnx.Module):
    """Projections, optional q-k norm, RoPE, `ctx.attend`, output projection.

    Models with a scale or cap of their own hand these to `ctx.attend` as the keywords `scale` and
    `softcap`; models whose layers differ hand it `is_local`, which says (perhaps traced) whether
    this one attends to the config's sliding window only.
    """

    def __init__(self, config: ModelConfig, *, key: jax.Array, init: Initializer):
        hidden, head_dim = config.hidden_size, config.head_dim
        heads = config.num_attention_heads * head_dim
        kv_heads = config.num_key_value_heads * head_dim
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        qkv_bias, o_bias = config.qkv_bias, config.attention_output_bias
        kv_axes = ("embed", "kv_heads")
        self.q_proj = Linear((hidden, heads), ("embed", "heads"), qkv_bias, key=q_key, init=init)
        self.k_proj = Linear((hidden, kv_heads), kv_axes, qkv_bias, key=k_key, init=init)
        self.v_proj = Linear((hidden, kv_heads), kv_axes, qkv_bias, key=v_key, init=init)
        self.o_proj = Linear((heads, hidden), ("heads", "embed"), o_bias, key=o_key, init=init)
        kind = RMSNorm1p if config.norm == "rmsnorm1p" else RMSNorm
        norm = partial(kind, eps=config.rms_norm_eps, init=init)
        q_norm = k_norm = None
        if config.qk_norm and config.qk_norm_width == "head":
            q_norm, k_norm = norm(head_dim), norm(head_dim)
        elif config.qk_norm:
            q_norm, k_norm = norm(heads, axis="heads"), norm(kv_heads, axis="kv_heads")
        self.q_norm, self.k_norm = q_norm, k_norm
        self.norm_width = config.qk_norm_width
        self.head_dim = head_dim
        self.rotates = config.position_embedding == "rope"
        self.scale = None if config.query_pre_attn_scalar is None else config.attention_scale
        self.softcap = config.attn_logit_softcapping
        self.mixes_windows = config.sliding_window_pattern is not None

    @jax.named_scope("attention")
    def __call__(
        self,
        x_BTD: jax.Array,
        rope: Rope,
        ctx: Context,
        cache: Cache = None,
        is_local: bool | jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        q_BTE, k_BTE, v_BTE = Linear.fan_out((self.q_proj, self.k_proj, self.v_proj), x_BTD, ctx)
        q_BTE, k_BTE = self._normed("all", q_BTE, k_BTE)
        q_BTNH = self._heads(q_BTE, "q_proj", "heads", ctx)
        k_BTKH = self._heads(k_BTE, "k_proj", "kv_heads", ctx)
        v_BTKH = self._heads(v_BTE, "v_proj", "kv_heads", ctx)
        q_BTNH, k_BTKH = self._normed("head", q_BTNH, k_BTKH)
        if self.rotates:
            q_BTNH, k_BTKH = apply_rope(q_BTNH, rope), apply_rope(k_BTKH, rope)
        q_BTNH, k_BTKH, v_BTKH = (checkpoint_name(x, "qkv") for x in (q_BTNH, k_BTKH, v_BTKH))
        special = {
            "scale": self.scale,
            "softcap": self.softcap,
            "is_local": is_local if self.mixes_windows else None,
        }
        special = {name: value for name, value in special.items() if value is not None}
        out_BTNH, cache = ctx.attend(q_BTNH, k_BTKH, v_BTKH, cache, **special)
        out_BTNH = ctx.constrain(out_BTNH, ("batch", "length", "heads", "head_dim"))
        out_BTE = rearrange(out_BTNH, "b t n h -> b t (n h)")
        return checkpoint_name(self.o_proj(out_BTE, ctx), "o_proj"), cache

    def _normed(self, width: str, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """q and k, normed where this is the width over which the model norms them."""
        if self.q_norm is None or self.k_norm is None or self.norm_width != width:
            return q, k
        return self.q_norm(q), self.k_norm(k)

    def _heads(self, out_BTE: jax.Array, name: str, axis: str, ctx: Context) -> jax.Array:
        out = rearrange(checkpoint_name(out_BTE, name), "b t (n h) -> b t n h", h=self.head_dim)
        return ctx.constrain(out, ("batch", "length", axis, "head_dim"))
