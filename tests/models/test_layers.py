"""Layers that no Llama-family twin covers equal torch's, and the pieces keep their contracts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.models.layers import Context, Initializer, LayerNorm, Linear
from jaxdist.models.mlp import MLP
from jaxdist.models.transformer import default_context
from jaxdist.ops.rope import rope_table

INIT = Initializer(std=0.3, dtype=jnp.float32)


@pytest.mark.parametrize("mlp", ["swiglu", "geglu", "gelu"])
def test_mlp_equals_torch(mlp, tiny_config):
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    config = tiny_config(mlp=mlp, mlp_bias=True)
    ours = MLP(config, key=jax.random.key(0), init=INIT)
    assert (ours.gate_proj is None) == (mlp == "gelu")
    x = np.random.default_rng(0).normal(size=(2, 3, 32)).astype(np.float32)

    def product(linear: Linear | None, x):
        assert linear is not None and linear.bias is not None
        weight, bias = (torch.tensor(np.asarray(p[...])) for p in (linear.weight, linear.bias))
        return F.linear(x, weight.T, bias)

    up = product(ours.up_proj, torch.tensor(x))
    if mlp == "gelu":
        hidden = F.gelu(up, approximate="tanh")
    else:
        gate = product(ours.gate_proj, torch.tensor(x))
        hidden = up * (F.silu(gate) if mlp == "swiglu" else F.gelu(gate, approximate="tanh"))
    expected = product(ours.down_proj, hidden)
    got = ours(jnp.asarray(x), default_context(config))
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-5)


def test_layer_norm_equals_torch():
    torch = pytest.importorskip("torch")
    x, gain, bias = np.random.default_rng(0).normal(size=(3, 4, 32)).astype(np.float32)
    norm = LayerNorm(32, 1e-5, init=INIT)
    norm.weight[...], norm.bias[...] = jnp.asarray(gain[0]), jnp.asarray(bias[0])
    expected = torch.nn.functional.layer_norm(
        torch.tensor(x), (32,), torch.tensor(gain[0]), torch.tensor(bias[0]), 1e-5
    )
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected.numpy(), atol=1e-5)


def test_bias_gradient_is_summed_in_the_masters_dtype(tiny_config):
    """256 ones sum to 256 in fp32; bf16 would be exact to 256 only, so 300 rows show it."""
    linear = Linear((1, 1), ("embed", "mlp"), True, key=jax.random.key(0), init=INIT)
    ctx = default_context(tiny_config(), compute_dtype=jnp.bfloat16)
    x = jnp.zeros((1, 301, 1), jnp.bfloat16)
    gradient = jax.grad(lambda layer: layer(x, ctx).astype(jnp.float32).sum())(linear)
    assert gradient.bias[...].dtype == jnp.float32
    assert gradient.bias[...].item() == 301.0


def test_a_block_touches_the_outside_through_its_context_only(tiny_model):
    """Every sharding request of a block, in order, and the shapes handed to attention."""
    model = tiny_model()
    constrained, attended = [], []

    def constrain(x, axes):
        assert x.ndim == len(axes)
        constrained.append(axes)
        return x

    def attend(q, k, v, cache):
        attended.extend([q.shape, k.shape, v.shape])
        return q, cache + 1

    plain = default_context(model.config)
    ctx = Context(dot=plain.dot, attend=attend, constrain=constrain, compute_dtype=jnp.float32)

    def run():
        block = jax.tree.map(lambda leaf: leaf[0], model.layers)
        rope = rope_table(model.config, jnp.arange(6)[None])
        return block(jnp.ones((1, 6, 32)), rope, ctx, jnp.zeros(3))

    out, cache = jax.eval_shape(run)
    assert out.shape == (1, 6, 32) and cache.shape == (3,)
    assert attended == [(1, 6, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8)]
    residual = ("batch", "sequence", "embed")
    heads, kv_heads = (("batch", "length", n, "head_dim") for n in ("heads", "kv_heads"))
    hidden = ("batch", "length", "mlp")
    attention = [heads, kv_heads, kv_heads, heads, residual]
    assert constrained == attention + [hidden, hidden, residual]
