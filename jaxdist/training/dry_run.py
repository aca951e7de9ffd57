"""`--dry-run`: what a step would take of each device's memory and send over each mesh axis.

The step is compiled as it would run, but with layer loops of fixed length, so that what loops
send can be counted; nothing is trained and nothing is written.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from jaxdist.parallel.audit import Collective, collectives
from jaxdist.training.setup import Setup


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Figures of one step; bytes are of one device."""

    parameters: int
    gradients: int  # reduced, in the layout of the ZeRO stage
    optimizer: int  # moments, and the EMA if there is one
    activations: int  # saved from forward to backward; what tp shards of them is not taken off
    temporary: int  # XLA: everything that lives only within the step, activations included
    peak: int  # XLA: the most that is alive at once
    traffic: list[Collective]


def measure(setup: Setup) -> DryRun:
    """Compile the step of `setup` and read its figures."""
    parallel = replace(setup.config.parallel, skip_bubbles=False)
    setup = replace(setup, config=replace(setup.config, parallel=parallel))
    compiled = setup.compile_train_step()
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and hlo is not None
    state, layout = setup.layout.abstract, setup.layout
    averages = 0 if state.ema is None else _bytes(state.ema, layout.state.ema, setup)
    reduced = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, setup.policy.reduce_dtype), state.params
    )
    return DryRun(
        parameters=_bytes(state.params, layout.state.params, setup),
        gradients=_bytes(reduced, layout.gradients, setup),
        optimizer=_bytes(state.opt_state, layout.state.opt_state, setup) + averages,
        activations=_saved_activations(setup),
        temporary=memory.temp_size_in_bytes,
        peak=peak_bytes(memory),
        traffic=collectives(hlo, setup.mesh.shape),
    )


def report(setup: Setup) -> None:
    """Print memory per device and collectives by mesh axis."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{setup.description}\n")
    figures = measure(setup)
    memory = Table("memory per device", "bytes", "", box=None, pad_edge=False)
    for name, size in (
        ("parameters", figures.parameters),
        ("gradients", figures.gradients),
        ("optimizer state", figures.optimizer),
        ("saved activations, at most", figures.activations),
        ("temporary (XLA)", figures.temporary),
        ("peak (XLA)", figures.peak),
    ):
        memory.add_row(name, f"{size:,}", _readable(size))
    console.print(memory)
    console.print()
    console.print(_traffic_table(figures.traffic))


def _traffic_table(traffic: Iterable[Collective]) -> Table:
    table = Table(
        "mesh axis", "collective", "count a step", "bytes a step", "", box=None, pad_edge=False
    )
    groups: dict[tuple[str, str], list[Collective]] = {}
    for one in traffic:
        groups.setdefault((" x ".join(one.axes), one.kind), []).append(one)
    for (axes, kind), found in sorted(groups.items()):
        known = [one.count for one in found if one.count is not None]
        if len(known) < len(found):
            table.add_row(axes, kind, "unknown", "unknown", "")
            continue
        size = sum(count * one.bytes for count, one in zip(known, found, strict=True))
        table.add_row(axes, kind, f"{sum(known):,}", f"{size:,}", _readable(size))
    if not groups:
        table.add_row("none", "", "0", "0", "")
    return table


def _bytes(tree: Any, specs: Any, setup: Setup) -> int:
    """Bytes that one device holds of the arrays of `tree` under `specs`."""

    def one(a: Any, spec: P) -> int:
        local = jax.NamedSharding(setup.mesh, spec).shard_shape(a.shape)
        # A typed key is two uint32 words.
        size = 8 if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a.dtype.itemsize
        return math.prod(local) * size

    return sum(jax.tree.leaves(jax.tree.map(one, tree, specs)))


def _saved_activations(setup: Setup) -> int:
    """Bytes of the rings in which a stage keeps activations from forward to backward."""
    with jax.set_mesh(setup.mesh):
        rings = setup.pipeline.residual_rings(
            setup.layout.target(setup.mesh).params, setup.abstract_batch().tokens.shape
        )
    return sum(int(np.prod(ring.shape)) * ring.dtype.itemsize for ring in rings)


def peak_bytes(memory: Any) -> int:
    """XLA's peak of the device, or all that it allocates there.

    XLA:CPU leaves the temporaries out of its peak, and XLA:GPU has the host's memory in it.
    """
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    allocated = held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    reported = memory.peak_memory_in_bytes
    is_the_devices = memory.host_temp_size_in_bytes == 0 and reported > memory.temp_size_in_bytes
    return reported if is_the_devices else allocated


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
