"""Accelerators as data: the makers' public figures, one small YAML file a device in `devices/`.

Read by the planner for memory, bandwidth and peak, by `compiled.py` to compile for machines that
are not here, and by the trainer, whose MFU is a share of the peak. No JAX is imported.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from jaxdist.config import UsageError
from jaxdist.config.errors import did_you_mean

_FOLDER = Path(__file__).parent / "devices"
_MOST_DEVICES = 8192  # describing more takes minutes


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What XLA asks of a GPU that it compiles for, where the makers' generations differ."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    cores_per_multiprocessor: int  # fp32
    clock_ghz: float
    l2_mib: int
    shared_kib_per_multiprocessor: int  # of which a block can take all but one KiB


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device. Bandwidths are of one device; those of links are of one direction."""

    kind: str  # the file's name, e.g. "h100"
    name: str
    driver_names: list[str]  # patterns of what JAX calls it; the longest that fits a name counts
    platform: str  # "cuda" or "tpu"
    memory_gib: float
    memory_gb_per_second: float
    tflops: dict[str, float]  # dense products, by number format
    devices_per_host: int
    link_gb_per_second: float  # to the devices of its host (GPU) or of its slice (TPU)
    network_gb_per_second: float  # to other hosts (GPU) or slices (TPU)
    sources: list[str]
    gpu: Gpu | None = None

    @property
    def memory_bytes(self) -> int:
        """All that the device has; its driver takes some of it."""
        return int(self.memory_gib * 2**30)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Devices to compile for: `h100:8x8` is 8 hosts of 8, `v5p:4x4x4` a torus of 64 chips."""

    hardware: Hardware
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read `KIND:SHAPE`.

        Raises:
            UsageError: The device or the shape is not one.
        """
        kind, colon, sizes = text.strip().lower().partition(":")
        hardware = read_hardware(kind.removeprefix("tpu").strip(" -_"))
        parts = sizes.split("x")
        most = 2 if hardware.platform == "cuda" else 3
        if not colon or not 1 <= len(parts) <= most or not all(map(_is_size, parts)):
            how = "HOSTSxDEVICES, as in" if hardware.platform == "cuda" else "a torus, as in"
            like = "8x8" if hardware.platform == "cuda" else "4x4x4"
            raise UsageError(f"{text!r}: after {hardware.kind} comes {how} {hardware.kind}:{like}")
        shape = tuple(map(int, parts))
        if hardware.platform == "cuda" and len(shape) == 1:
            shape = (1, *shape)
        target = cls(hardware=hardware, shape=shape)
        if target.num_devices > _MOST_DEVICES:
            raise UsageError(f"{text!r} has {target.num_devices} devices; the most is 8192")
        return target

    def __str__(self) -> str:
        return f"{self.hardware.kind}:{'x'.join(map(str, self.shape))}"


def kinds() -> list[str]:
    """The devices that are described here."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


@cache
def read_hardware(kind: str) -> Hardware:
    """A device's description.

    Raises:
        UsageError: There is none of this name.
    """
    if kind not in kinds():
        hint = did_you_mean(kind, kinds())
        raise UsageError(f"{kind!r} is not a known device; choose {', '.join(kinds())}{hint}")
    fields: dict[str, Any] = yaml.safe_load((_FOLDER / f"{kind}.yaml").read_text())
    gpu = fields.pop("gpu", None)
    if gpu is not None:
        gpu = Gpu(**gpu | {"compute_capability": tuple(gpu["compute_capability"])})
    return Hardware(kind=kind, gpu=gpu, **fields)


def hardware_named(driver_name: str) -> Hardware | None:
    """The description of a device by the name that its driver gives (`jax.Device.device_kind`).

    None where there is none. A slice of a GPU (MIG) has other figures than the whole.
    """
    if " MIG " in driver_name:
        return None
    fitting = [
        (len(pattern), kind)
        for kind in kinds()
        for pattern in read_hardware(kind).driver_names
        if fnmatchcase(driver_name, pattern)
    ]
    return read_hardware(max(fitting)[1]) if fitting else None


def _is_size(word: str) -> bool:
    return word.isascii() and word.isdigit() and 0 < int(word) and len(word) < 6
