"""Several processes: join them before a device is touched, and tell who speaks.

JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment describe the
group; without them a run is one process.
"""

import os
import time
from typing import Any

import jax
from jax._src import distributed as jax_group  # what it holds has no public name

from jaxdist.config import UsageError

_FAREWELL = 1.0  # seconds between the last goodbye and the end of the service
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# What launchers tell their processes; jaxdist reads none of it, so each would train alone.
_LAUNCHERS = {
    "torchrun": "WORLD_SIZE",
    "mpirun": "OMPI_COMM_WORLD_SIZE",
    "srun": "SLURM_STEP_NUM_TASKS",
}


def start() -> None:
    """Join the group that the environment describes; does nothing where it describes none.

    Raises `UsageError` where only a part of the variables is set or one makes no sense, and where
    another launcher started several processes that know nothing of one another.
    """
    values = {name: os.environ.get(name) for name in _VARIABLES}
    missing = [name for name, value in values.items() if not value]
    if len(missing) == len(_VARIABLES):
        _check_launcher()
        return
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set, though {', '.join(set(_VARIABLES) - set(missing))} is; "
            "set all three for a run of several processes, or none"
        )
    address, count, index = values.values()
    if not (str(count).isdigit() and str(index).isdigit() and int(str(index)) < int(str(count))):
        raise UsageError(
            f"JAX_PROCESS_ID={index} and JAX_NUM_PROCESSES={count} must be whole numbers with "
            "0 <= id < processes"
        )
    _, colon, port = str(address).rpartition(":")
    if not (colon and port.isdigit() and 0 < int(port) < 2**16):
        raise UsageError(
            f"JAX_COORDINATOR_ADDRESS={address} must be HOST:PORT of process 0, such as node0:1234"
        )
    jax.distributed.initialize(address, int(str(count)), int(str(index)))
    if jax_group.global_state.service is not None:
        jax_group.global_state.service = _PatientService(jax_group.global_state.service)


def _check_launcher() -> None:
    for launcher, name in _LAUNCHERS.items():
        count = os.environ.get(name, "")
        if count.isdigit() and int(count) > 1:
            raise UsageError(
                f"{name}={count}: {launcher} started several processes, and each would train "
                f"alone; start one process a host, with {', '.join(_VARIABLES)} set in each, or "
                f"unset {name}"
            )


class _PatientService:
    """The service of process 0, which ends a moment after all have said goodbye.

    gRPC aborts a server that ends while a call still comes in ("Check failed: queue.Pop() ==
    nullptr"), and the threads of the others call until they are gone. A run that has saved all
    it made would end with a signal.
    """

    def __init__(self, service: Any):
        self._service = service

    def shutdown(self) -> None:
        time.sleep(_FAREWELL)
        self._service.shutdown()


def is_first_process() -> bool:
    """Whether this process writes logs and metrics for all."""
    return jax.process_index() == 0
