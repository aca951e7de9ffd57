"""`jaxdist plan`: a run's step compiled and told; nothing is trained and nothing is written."""

import json
import time
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxdist.config import RunConfig
from jaxdist.config.checks import check_mesh
from jaxdist.ops.product import cpu_multiplies_bf16
from jaxdist.parallel.audit import collectives
from jaxdist.parallel.mesh import make_mesh, shape_of
from jaxdist.planner.compiled import devices, kernels_of
from jaxdist.planner.hardware import Hardware, Target
from jaxdist.planner.ledger import Row, ledger, table
from jaxdist.planner.memory import Memory, estimate
from jaxdist.planner.readable import readable
from jaxdist.planner.traffic import Traffic
from jaxdist.training.dry_run import peak_bytes
from jaxdist.training.setup import Setup

_WIDTH = 150  # of the table of collectives, which nobody can read wrapped


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A step that was compiled and not run; bytes are of one device."""

    setup: Setup
    hardware: Hardware | None  # what it was compiled for, where that is not what is here
    estimated: Memory
    compiled_bytes: int  # XLA: the most that is alive at once
    compile_seconds: float
    traffic: list[Row]
    hlo: str  # the compiled program

    @property
    def ratio(self) -> float:
        """The estimate over what XLA says."""
        return self.estimated.peak / self.compiled_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        memory: dict[str, Any] = {
            "compiled_bytes": self.compiled_bytes,
            "estimated_bytes": self.estimated.peak,
            "ratio": self.ratio,
            "parts": dict(self.estimated.__dict__),
        }
        if self.hardware is not None:
            memory["device_bytes"] = self.hardware.memory_bytes
        return {
            "device": _device(self.setup).device_kind,
            "mesh": dict(self.setup.mesh.shape),
            "memory": memory,
            "compile_seconds": round(self.compile_seconds, 1),
            "collectives": [row.as_dict() for row in self.traffic],
        }


def compile_here(config: RunConfig) -> Planned:
    """Compile the step for the devices that are here, simulated ones included."""
    return _compile(Setup.of(config), None)


def compile_for(config: RunConfig, target: Target) -> Planned:
    """Compile the step for a machine that is not here.

    Raises `UsageError` where its compiler is not installed or the mesh does not fit.
    """
    mesh = make_mesh(config.mesh_shape, config, devices(target))
    check_mesh(config, shape_of(mesh))
    with kernels_of(target.hardware):
        return _compile(Setup(config, mesh), target.hardware)


def report(planned: Planned, *, as_json: bool) -> None:
    """Print what was found."""
    if as_json:
        print(json.dumps(planned.as_dict()))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    setup, config = planned.setup, planned.setup.config
    shape = ", ".join(f"{axis}={size}" for axis, size in setup.mesh.shape.items())
    console.print(
        f"{config.name} on {setup.mesh.size} x {_device(setup).device_kind}, {shape}: "
        f"ZeRO-{config.parallel.zero}, {config.parallel.schedule}, "
        f"{config.parallel.num_microbatches} microbatches, remat {config.parallel.remat}, "
        f"{config.precision.policy}; compiled in {planned.compile_seconds:.0f} s\n"
    )
    console.print(_memory_table(planned))
    console.print("\nsent by each device in a step:\n")
    console.print(table(planned.traffic))
    if _device(setup).platform == "cpu" and config.precision.policy != "fp32":
        console.print(
            "\nA CPU works on 16-bit numbers as fp32 and sends them so, which is in the working "
            "memory, in what is sent and in the least; an accelerator needs less."
        )


def _compile(setup: Setup, hardware: Hardware | None) -> Planned:
    # With loops of fixed length each collective's count is known.
    fixed = replace(setup.config.parallel, skip_bubbles=False)
    setup = replace(setup, config=replace(setup.config, parallel=fixed))
    start = time.perf_counter()
    compiled = setup.compile_train_step()
    seconds, hlo = time.perf_counter() - start, compiled.as_text() or ""
    platform = _device(setup).platform
    needed = Traffic(
        pipeline=setup.pipeline,
        parameters=setup.layout.abstract.params,
        batch_shape=setup.abstract_batch().tokens.shape,
        widened=platform == "cpu",
    )
    schedule = setup.pipeline.schedule
    return Planned(
        setup=setup,
        hardware=hardware,
        estimated=estimate(
            setup.config,
            setup.mesh_shape,
            schedule,
            platform=platform,
            bf16_products=cpu_multiplies_bf16(),
        ),
        compiled_bytes=peak_bytes(compiled.memory_analysis()),
        compile_seconds=seconds,
        traffic=ledger(needed.flows(), collectives(hlo, setup.mesh.shape)),
        hlo=hlo,
    )


def _memory_table(planned: Planned) -> Table:
    lines = Table("memory per device", "", box=None, pad_edge=False)
    for name, size in planned.estimated.__dict__.items():
        lines.add_row(name.replace("_", " "), readable(size))
    lines.add_row("peak, estimated", readable(planned.estimated.peak))
    lines.add_row("peak, compiled (XLA)", f"{readable(planned.compiled_bytes)}")
    lines.add_row("estimated / compiled", f"{planned.ratio:.2f}")
    if planned.hardware is not None:
        lines.add_row("the device has", readable(planned.hardware.memory_bytes))
    return lines


def _device(setup: Setup) -> Any:
    return setup.mesh.devices.flat[0]
