"""The feed-forward half of a block.

Shapes: B batch rows, T tokens, D hidden size, F intermediate size.
"""

from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxdist.config import ModelConfig
from jaxdist.models.layers import Context, Initializer, Linear
from jaxdist.ops.activations import geglu, gelu, swiglu

GATED = {"swiglu": swiglu, "geglu": geglu}


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), or down(gelu(up(x))) where `config.mlp` is not gated."""

    def __init__(self, config: ModelConfig, *, key: jax.Array, init: Initializer):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        gate_key, up_key, down_key = jax.random.split(key, 3)
        into, out_of = ("embed", "mlp"), ("mlp", "embed")
        gated = config.mlp in GATED
        expand = partial(Linear, (hidden, inner), into, bias, init=init)
        self.gate_proj = expand(key=gate_key) if gated else None
        self.up_proj = expand(key=up_key)
        self.down_proj = Linear((inner, hidden), out_of, bias, key=down_key, init=init)
        self.activation = config.mlp

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """Gate (where there is one), up and down, [I, O] each."""
        linears = (self.gate_proj, self.up_proj, self.down_proj)
        return tuple(linear.weight[...] for linear in linears if linear is not None)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        axes = ("batch", "length", "mlp")
        if self.gate_proj is None:
            (up_BTF,) = Linear.fan_out((self.up_proj,), x_BTD, ctx)
            hidden_BTF = gelu(ctx.constrain(checkpoint_name(up_BTF, "up_proj"), axes))
        else:
            up_BTF, gate_BTF = Linear.fan_out((self.up_proj, self.gate_proj), x_BTD, ctx)
            up_BTF = ctx.constrain(checkpoint_name(up_BTF, "up_proj"), axes)
            gate_BTF = ctx.constrain(checkpoint_name(gate_BTF, "gate_proj"), axes)
            hidden_BTF = GATED[self.activation](gate_BTF, up_BTF)
        hidden_BTF = checkpoint_name(hidden_BTF, "mlp_hidden")
        return checkpoint_name(self.down_proj(hidden_BTF, ctx), "down_proj")
