"""Activations of the MLP; all elementwise, computed in fp32, in and out in the input's dtype."""

import jax
import jax.numpy as jnp


def gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation of GELU (GPT-2's)."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, the gated unit of Llama (arXiv 2002.05202)."""
    out = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return out.astype(gate.dtype)


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gelu_tanh(gate) * up, the gated unit of Gemma."""
    out = jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)
    return out.astype(gate.dtype)
