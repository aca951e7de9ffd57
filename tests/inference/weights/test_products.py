"""A weight in blocks that tp shares multiplies as a plain one does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape
from jaxdist.inference.weights.products import block_spec, linear_over_tp
from jaxdist.ops import kernels
from jaxdist.ops.linear import LANES, Blocks, in_blocks
from jaxdist.parallel.mesh import make_mesh


@pytest.mark.parametrize("by_kernels", [True] * kernels.available() + [False])
@pytest.mark.parametrize("split", ["whole", "columns", "rows"])
def test_equals_the_plain_weight(split, by_kernels, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: by_kernels)
    mesh = make_mesh(MeshShape(tp=2))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 1, 24)), jnp.float32)
    stack = jnp.asarray(rng.normal(size=(2, 24, 6 * LANES)), jnp.bfloat16)
    blocks, spec = in_blocks(stack), (None, *block_spec(split))
    blocks = jax.device_put(blocks, NamedSharding(mesh, P(*spec)))

    def product(x, blocks):
        return linear_over_tp(x, Blocks(blocks, 1, split), jnp.float32)

    with jax.set_mesh(mesh):
        region = jax.shard_map(
            product, axis_names={"dp", "pp"}, in_specs=(P(), P()), out_specs=P(), check_vma=False
        )
        compiled = jax.jit(region).lower(x, blocks).compile()
        found = compiled(x, blocks)
    np.testing.assert_allclose(found, x @ stack[1].astype(jnp.float32), rtol=1e-5, atol=1e-5)
    # A member of tp gathers no weight: what moves is the sum, where rows are shared.
    assert compiled.as_text().count(" all-reduce(") == (split == "rows")
    assert " all-gather" not in compiled.as_text()
