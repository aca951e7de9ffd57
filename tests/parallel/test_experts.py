"""What is kept of experts for the backward pass, traced as on an accelerator."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops import experts
from jaxdist.ops.activations import swiglu
from jaxdist.parallel.experts import whole_experts

EXPERTS, HIDDEN, FEATURES, CHOICES, TOKENS = 5, 8, 12, 2, 30


def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(EXPERTS, HIDDEN, FEATURES)] * 2 + [(EXPERTS, FEATURES, HIDDEN)]
    weights = tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False))
    x = jax.random.normal(keys[3], (1, TOKENS, HIDDEN))
    shares, choices = jax.lax.top_k(jax.random.uniform(keys[4], (1, TOKENS, EXPERTS)), CHOICES)
    return x, weights, choices, shares


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_no_copy_of_the_weights_is_kept(platform, monkeypatch):
    """In 16 bits it would lie in the rings once for each microbatch in flight."""
    monkeypatch.setattr(experts, "platform", lambda: platform)

    def kept(x, weights, choices, shares):
        layer = partial(whole_experts, activation=swiglu, compute_dtype=jnp.bfloat16)
        _, pull = jax.vjp(lambda x, w: layer(x, w, choices, shares), x, weights)
        given = {id(w) for w in weights}
        return [a for a in jax.tree.leaves(pull) if id(a) not in given]

    shapes = [a.shape for a in jax.eval_shape(kept, *arrays())]
    assert shapes and not any(len(s) == 3 and s[0] == EXPERTS for s in shapes), shapes


def test_gradients_are_those_of_experts_that_keep_one(monkeypatch):
    monkeypatch.setattr(experts, "platform", lambda: "gpu")
    x, weights, choices, shares = arrays()

    def pulled(layer):
        how = dict(activation=swiglu, compute_dtype=jnp.float32)

        def total(x, weights, shares):
            return jnp.sin(layer(x, weights, choices, shares, **how)).sum()

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(x, weights, shares)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max()),
        pulled(whole_experts),
        pulled(experts.routed_experts),
    )
