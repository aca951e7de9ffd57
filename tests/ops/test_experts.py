"""Routed experts against every expert on every token; both ways of multiplying in groups."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops import experts
from jaxdist.ops.activations import swiglu
from jaxdist.ops.row_blocks import rows_of_block

TOKENS, HIDDEN, EXPERTS, FEATURES, CHOICES = 70, 8, 5, 12, 2


def arrays(chosen: str):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(EXPERTS, HIDDEN, FEATURES)] * 2 + [(EXPERTS, FEATURES, HIDDEN)]
    weights = tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False))
    x = jax.random.normal(keys[3], (1, TOKENS, HIDDEN))
    _, choices = jax.lax.top_k(jax.random.normal(keys[4], (1, TOKENS, EXPERTS)), CHOICES)
    if chosen == "all the same":  # 140 rows of two experts, none of the others
        choices = jnp.broadcast_to(jnp.array([3, 1]), choices.shape)
    return x, weights, choices, jax.random.uniform(keys[5], (1, TOKENS, CHOICES))


def every_expert(x, weights, choices, shares):
    gate, up = (jnp.einsum("btd,edf->btef", x, w, precision="highest") for w in weights[:2])
    out = jnp.einsum("btef,efd->bted", swiglu(gate, up), weights[2], precision="highest")
    count = (jax.nn.one_hot(choices, EXPERTS) * shares[..., None]).sum(axis=2)
    return jnp.einsum("bted,bte->btd", out, count, precision="highest")


def routed(x, weights, choices, shares, first=0):
    how = dict(activation=swiglu, compute_dtype=jnp.float32, first=first)
    return jax.jit(partial(experts.routed_experts, **how))(x, weights, choices, shares)


@pytest.mark.parametrize(
    "platform, chosen",
    [
        *(("cpu", "at random"), ("gpu", "all the same"), ("tpu", "at random")),
        pytest.param("cpu", "all the same", marks=pytest.mark.slow),
        pytest.param("gpu", "at random", marks=pytest.mark.slow),
        pytest.param("tpu", "all the same", marks=pytest.mark.slow),
    ],
)
def test_equals_every_expert_on_every_token(platform, chosen, monkeypatch):
    monkeypatch.setattr(experts, "platform", lambda: platform)
    x, weights, choices, shares = arrays(chosen)

    def pulled(function):
        def total(x, weights, shares):
            return jnp.sin(function(x, weights, choices, shares)).sum()

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(x, weights, shares)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max()),
        pulled(routed),
        pulled(every_expert),
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_kept_are_neither_weights_nor_anything_wider_than_the_compute_dtype(platform, monkeypatch):
    """In a pipeline it would lie in the rings, once for each microbatch in flight."""
    monkeypatch.setattr(experts, "platform", lambda: platform)
    half = jnp.bfloat16

    def kept(x, weights, choices, shares):
        layer = partial(experts.routed_experts, activation=swiglu, compute_dtype=half)
        _, pull = jax.vjp(lambda x, w: layer(x, w, choices, shares), x.astype(half), weights)
        given = {id(w) for w in weights}
        return [a for a in jax.tree.leaves(pull) if id(a) not in given]

    found = jax.eval_shape(kept, *arrays("at random"))
    assert found and not any(a.ndim == 3 and a.shape[0] == EXPERTS for a in found), found
    wide = [a for a in found if a.shape[-1] in (HIDDEN, FEATURES)]
    assert wide and all(a.dtype == half for a in wide), found


@pytest.mark.parametrize("platform, block", [("cpu", 4), ("gpu", 4), ("tpu", 1)])
def test_gradients_of_weights_are_never_rounded(platform, block, monkeypatch):
    monkeypatch.setattr(experts, "platform", lambda: platform)
    rows, groups = 40, jnp.array([8, 0, 20, 8], jnp.int32)  # the last four belong to none
    keys = jax.random.split(jax.random.key(1), 3)
    x, dout = (
        jax.random.normal(k, (rows, n), jnp.bfloat16)
        for k, n in zip(keys, (HIDDEN, FEATURES), strict=False)
    )
    w = jax.random.normal(keys[2], (4, HIDDEN, FEATURES))
    times = partial(experts.grouped_dot, groups=groups, block=block, compute_dtype=jnp.bfloat16)
    dx, dw = jax.vjp(times, x, w)[1](dout)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    ends = np.cumsum(groups)
    exact = [
        np.float64(x[end - size : end]).T @ np.float64(dout[end - size : end])
        for end, size in zip(ends, np.asarray(groups), strict=True)
    ]
    np.testing.assert_allclose(dw, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize(
    "num_rows, num_experts, rows",
    [(8192, 8, 256), (24_576, 64, 64), (32, 8, 16), (1 << 24, 8, 2048)],
)
def test_a_gpus_blocks_are_as_large_as_padding_allows(num_rows, num_experts, rows):
    assert rows_of_block(num_rows, num_experts, "gpu") == rows
    assert rows == 16 or rows * num_experts <= num_rows // 4


def test_parts_of_the_experts_add_up():
    x, weights, choices, shares = arrays("at random")
    parts = [
        routed(x, tuple(w[own] for w in weights), choices, shares, first=own.start)
        for own in (slice(0, 2), slice(2, 5))
    ]
    whole = routed(x, weights, choices, shares)
    np.testing.assert_allclose(sum(parts), whole, rtol=0, atol=1e-6 * np.abs(whole).max())
