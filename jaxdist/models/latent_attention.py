"""Multi-head latent attention (DeepSeek-V2 and V3, arXiv 2405.04434): keys and values of all heads
are made of one narrow latent, and position enters through a key part that heads share.

Shapes: B batch rows, T tokens, D hidden size, N heads, H head dim (of which R turn with RoPE),
V width of a head's values, C latent width.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxdist.config import ModelConfig
from jaxdist.models.layers import Cache, Context, Initializer, Linear, RMSNorm
from jaxdist.ops.rope import Rope, apply_rope

LATENT_EPS = 1e-6  # of the latents' norms, in every published model
_HEADS = ("batch", "length", "heads", "head_dim")


@dataclass(frozen=True)
class _Widths:
    """How a head's parts lie beside each other."""

    plain: int  # of queries and keys
    turned: int
    values: int


class LatentAttention(nnx.Module):
    """Projections down to latents and up to heads, RoPE, `ctx.attend`, output projection."""

    def __init__(self, config: ModelConfig, *, key: jax.Array, init: Initializer):
        hidden, heads = config.hidden_size, config.num_attention_heads
        q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
        self.widths = _Widths(config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        self.scale = config.attention_scale
        keys = jax.random.split(key, 5)

        def linear(place: int, sizes: tuple[int, int], *axes: str) -> Linear:
            return Linear(sizes, axes, False, key=keys[place], init=init)

        q_width, kv_width = heads * config.head_dim, heads * (self.widths.plain + config.v_head_dim)
        self.q_proj = None if q_rank else linear(0, (hidden, q_width), "embed", "heads")
        self.q_a_proj = linear(0, (hidden, q_rank), "embed", "latent") if q_rank else None
        self.q_a_layernorm = RMSNorm(q_rank, LATENT_EPS, init=init) if q_rank else None
        self.q_b_proj = linear(1, (q_rank, q_width), "latent", "heads") if q_rank else None
        joint = (hidden, kv_rank + config.qk_rope_head_dim)
        self.kv_a_proj_with_mqa = linear(2, joint, "embed", "latent")
        self.kv_a_layernorm = RMSNorm(kv_rank, LATENT_EPS, init=init)
        self.kv_b_proj = linear(3, (kv_rank, kv_width), "latent", "heads")
        self.o_proj = linear(4, (heads * config.v_head_dim, hidden), "heads", "embed")

    @jax.named_scope("attention")
    def __call__(
        self,
        x_BTD: jax.Array,
        rope: Rope,
        ctx: Context,
        cache: Cache = None,
        is_local: bool | jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        plain, turned = self.widths.plain, self.widths.turned
        if self.q_proj is not None:
            projections = (self.q_proj, self.kv_a_proj_with_mqa)
            q_BTE, latent_BTC = Linear.fan_out(projections, x_BTD, ctx)
        else:
            down, norm, up = self.q_a_proj, self.q_a_layernorm, self.q_b_proj
            assert down is not None and norm is not None and up is not None
            q_BTC, latent_BTC = Linear.fan_out((down, self.kv_a_proj_with_mqa), x_BTD, ctx)
            (q_BTE,) = Linear.fan_out((up,), norm(q_BTC), ctx)
        rank = latent_BTC.shape[-1] - turned
        k_turned_BT1R = _pairs_apart(latent_BTC[:, :, None, rank:])
        latent_BTC = self.kv_a_layernorm(latent_BTC[..., :rank])
        (kv_BTE,) = Linear.fan_out((self.kv_b_proj,), latent_BTC, ctx)
        q_BTNH = self._heads(checkpoint_name(q_BTE, "q_proj"), plain + turned, ctx)
        kv_BTNx = self._heads(checkpoint_name(kv_BTE, "k_proj"), plain + self.widths.values, ctx)
        q_turned_BTNR = apply_rope(_pairs_apart(q_BTNH[..., plain:]), rope)
        k_turned_BT1R = apply_rope(k_turned_BT1R, rope)
        k_turned_BTNR = jnp.broadcast_to(k_turned_BT1R, q_turned_BTNR.shape)
        q_BTNH = jnp.concatenate([q_BTNH[..., :plain], q_turned_BTNR], axis=-1)
        k_BTNH = jnp.concatenate([kv_BTNx[..., :plain], k_turned_BTNR], axis=-1)
        q_BTNH, k_BTNH, v_BTNV = (
            checkpoint_name(ctx.constrain(x, _HEADS), "qkv")
            for x in (q_BTNH, k_BTNH, kv_BTNx[..., plain:])
        )
        out_BTNV, cache = ctx.attend(q_BTNH, k_BTNH, v_BTNV, cache, scale=self.scale)
        out_BTE = rearrange(ctx.constrain(out_BTNV, _HEADS), "b t n v -> b t (n v)")
        return checkpoint_name(self.o_proj(out_BTE, ctx), "o_proj"), cache

    def _heads(self, out_BTE: jax.Array, width: int, ctx: Context) -> jax.Array:
        return ctx.constrain(rearrange(out_BTE, "b t (n h) -> b t n h", h=width), _HEADS)


def _pairs_apart(x: jax.Array) -> jax.Array:
    """The pairs (0, 1), (2, 3)... that these models turn, as (0, R/2), (1, R/2 + 1)..., as we do.

    Queries and keys are reordered alike, which changes no score.
    """
    return rearrange(x, "... (r two) -> ... (two r)", two=2)
