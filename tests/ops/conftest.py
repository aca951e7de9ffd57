"""Ops as the trainer runs them: in a `shard_map` manual over dp, tp left to the partitioner."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


class Sharded:
    """What `value_and_grads` gives, and the collectives in the compiled program."""

    def __init__(self, grads: Any, collectives: set[str]):
        self.grads, self.collectives = grads, collectives


def _value_and_grads(op: Callable[..., jax.Array], *args: jax.Array) -> tuple[jax.Array, Any]:
    """`op(*args)` and the gradients of all float args under a cotangent that is not constant."""
    floats = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))

    def weighted(*floating: jax.Array) -> tuple[jax.Array, jax.Array]:
        full = list(args)
        for i, a in zip(floats, floating, strict=True):
            full[i] = a
        out = op(*full)
        weight = jnp.cos(jnp.arange(out[0].size, dtype=jnp.float32)).reshape(1, *out.shape[1:])
        return (out.astype(jnp.float32) * weight).sum(), out

    grad = jax.grad(weighted, argnums=tuple(range(len(floats))), has_aux=True)
    grads, out = grad(*(args[i] for i in floats))
    return out, grads


@pytest.fixture
def value_and_grads() -> Callable[..., tuple[jax.Array, Any]]:
    """`value_and_grads(op, *args)`: see above."""
    return _value_and_grads


@pytest.fixture
def sharded() -> Callable[..., Sharded]:
    """Runs an op's value and gradients on 2 x 2 devices.

    Each argument's dim 0 is split over dp (manual) and `specs` shards the rest over tp (automatic).
    """
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"), (AxisType.Auto,) * 2)

    def run(op: Callable[..., jax.Array], args: tuple[jax.Array, ...], specs: tuple[P, ...]):
        def member(*local: jax.Array) -> Any:
            constrained = [
                jax.lax.with_sharding_constraint(a, s) for a, s in zip(local, specs, strict=True)
            ]
            return _value_and_grads(op, *constrained)

        program = jax.jit(
            jax.shard_map(member, axis_names={"dp"}, in_specs=P("dp"), out_specs=P("dp"))
        )
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(a, NamedSharding(mesh, P("dp", *s[1:])))
                for a, s in zip(args, specs, strict=True)
            ]
            compiled = program.lower(*placed).compile()
            return Sharded(compiled(*placed), set(COLLECTIVE.findall(compiled.as_text())))

    return run
