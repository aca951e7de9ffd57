"""Attention by heads over tp equals attention on one device, and so do its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape
from jaxdist.ops.attention import causal_attention
from jaxdist.parallel.attention import by_heads
from jaxdist.parallel.mesh import make_mesh


@pytest.mark.parametrize("is_local", [None, True])
def test_equals_one_device(is_local: bool | None):
    random = np.random.default_rng(0)
    q, k, v, dout = (
        jnp.asarray(random.standard_normal((4, 12, heads, 8)), jnp.float32)
        for heads in (8, 4, 4, 8)
    )
    segments = jnp.asarray(np.sort(random.integers(1, 3, (4, 12)), axis=1), jnp.int32)
    traced = None if is_local is None else jnp.asarray(is_local)

    def attention(q, k, v, segments, traced):
        return causal_attention(q, k, v, segment_ids=segments, sliding_window=3, is_local=traced)

    def plain(q, k, v):
        return (attention(q, k, v, segments, traced) * dout).sum()

    def region(q, k, v, segments, traced, dout):
        def sharded(q, k, v):
            return (by_heads(attention, q, k, v, (segments, traced)) * dout).sum()

        loss, gradients = jax.value_and_grad(sharded, (0, 1, 2))(q, k, v)
        return jax.lax.psum(loss, ("dp", "pp")), gradients

    rows, whole = P(("dp", "pp")), P()
    with jax.set_mesh(make_mesh(MeshShape(dp=2, pp=2, tp=2))):
        found = jax.jit(
            jax.shard_map(
                region,
                axis_names={"dp", "pp"},
                in_specs=(rows, rows, rows, rows, whole, rows),
                out_specs=(whole, (rows, rows, rows)),
            )
        )(q, k, v, segments, traced, dout)
    wanted = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(q, k, v)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
