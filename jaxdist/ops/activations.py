"""Activations of the MLP: elementwise, computed in fp32, in and out in the input's dtype.

Each backward pass computes again from the inputs, which are all that is kept.
"""

import jax
import jax.numpy as jnp

_SQRT_2_OVER_PI = 0.7978845608028654
_CUBIC = 0.044715  # GELU's tanh approximation, arXiv 1606.08415


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation of GELU (GPT-2's)."""
    value, _ = _gelu_and_slope(x.astype(jnp.float32))
    return value.astype(x.dtype)


def _gelu_backward(x: jax.Array, dout: jax.Array) -> tuple[jax.Array]:
    _, slope = _gelu_and_slope(x.astype(jnp.float32))
    return ((dout.astype(jnp.float32) * slope).astype(x.dtype),)


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, the gated unit of Llama (arXiv 2002.05202)."""
    value, _ = _silu_and_slope(gate.astype(jnp.float32))
    return (value * up.astype(jnp.float32)).astype(gate.dtype)


@jax.custom_vjp
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gelu(gate) * up, the gated unit of Gemma (arXiv 2002.05202)."""
    value, _ = _gelu_and_slope(gate.astype(jnp.float32))
    return (value * up.astype(jnp.float32)).astype(gate.dtype)


def _silu_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    sigmoid = jax.nn.sigmoid(x)
    value = x * sigmoid
    return value, sigmoid + value * (1.0 - sigmoid)


def _gelu_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    square = x * x
    tanh = jnp.tanh(_SQRT_2_OVER_PI * x * (1.0 + _CUBIC * square))
    half = 0.5 * (1.0 + tanh)
    inner_slope = _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * square)
    return x * half, half + 0.5 * x * (1.0 - tanh * tanh) * inner_slope


def _gated_backward(activation, kept, dout):
    gate, up = kept
    value, slope = activation(gate.astype(jnp.float32))
    dout = dout.astype(jnp.float32)
    dgate = dout * up.astype(jnp.float32) * slope
    return dgate.astype(gate.dtype), (dout * value).astype(up.dtype)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)
swiglu.defvjp(
    lambda gate, up: (swiglu(gate, up), (gate, up)),
    lambda kept, dout: _gated_backward(_silu_and_slope, kept, dout),
)
geglu.defvjp(
    lambda gate, up: (geglu(gate, up), (gate, up)),
    lambda kept, dout: _gated_backward(_gelu_and_slope, kept, dout),
)
