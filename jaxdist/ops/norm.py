"""Normalisation over the last dim: fp32 statistics, result in the input's dtype."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * gain over the last dim; gain [D] (arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    gain = jnp.expand_dims(gain.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (x32 * inverse * gain).astype(x.dtype)


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * gain + bias over the last dim; gain and bias [D]."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    lead = tuple(range(x.ndim - 1))
    out = centred * inverse * jnp.expand_dims(gain.astype(jnp.float32), lead)
    if bias is not None:
        out = out + jnp.expand_dims(bias.astype(jnp.float32), lead)
    return out.astype(x.dtype)
