"""The device mesh: always the three axes ('dp', 'pp', 'tp'), size 1 included, so that one code
path serves every degree of parallelism."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxdist.config import MeshShape, RunConfig
from jaxdist.config.checks import too_few_devices

AXES = ("dp", "pp", "tp")


def make_mesh(
    shape: MeshShape,
    config: RunConfig | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Mesh over the first `shape.size` devices: tp innermost (inside a host), then pp, then dp.

    Raises `UsageError` where there are fewer devices than the mesh needs; with a `config`, the
    meshes that it proposes fit model and batch.
    """
    devices = jax.devices() if devices is None else devices
    shape = shape.resolve(len(devices))
    if shape.size > len(devices):
        raise too_few_devices(shape, len(devices), devices[0].platform, config)
    grid = np.asarray(devices[: shape.size]).reshape(shape.dp, shape.pp, shape.tp)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def shape_of(mesh: Mesh) -> MeshShape:
    """The degrees of a mesh."""
    return MeshShape(**mesh.shape)
