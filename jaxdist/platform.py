"""The process before JAX starts: simulated devices, the allocator, the compilation cache.

JAX reads its environment when it is imported and its flags when it first looks for devices, so
these are called by the doors, early. No JAX is imported here unless it already is.
"""

import ctypes
import os
import re
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from jaxdist.config.errors import CTRL_C_EXIT_CODE, UsageError

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
# Devices that share few cores with other programs wait for each other for minutes; XLA would
# take that for a deadlock after 40 s and abort the process.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"

_MOST_SIMULATED = 8192  # making more takes the CPU minutes

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_LARGEST = 2**31 - 1  # mallopt takes an int


def simulate_devices(num_devices: int) -> None:
    """Let the CPU stand in for `num_devices` devices, and leave accelerators alone.

    The devices share the cores: what is simulated is the program, not the speed. Where
    JAX_NUM_PROCESSES says that the run has several processes, each makes its share.

    Raises:
        UsageError: The devices cannot be shared equally among the processes, or are too many.
        RuntimeError: JAX has already looked for its devices.
    """
    processes = os.environ.get("JAX_NUM_PROCESSES", "1")
    if not processes.isdecimal() or int(processes) < 1 or num_devices % int(processes):
        raise UsageError(
            f"{num_devices} simulated devices cannot be shared equally among "
            f"JAX_NUM_PROCESSES={processes}; choose a mesh whose size is a multiple of it"
        )
    num_devices //= int(processes)
    if num_devices > _MOST_SIMULATED:
        raise UsageError(
            f"{num_devices} simulated devices are more than the {_MOST_SIMULATED} that a CPU can "
            "stand in for; choose a smaller mesh"
        )
    if "jax" in sys.modules:
        import jax

        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_platforms", "cpu")
        return
    flags = re.sub(rf"{_DEVICE_COUNT}=\S*", "", os.environ.get("XLA_FLAGS", "")).split()
    if not any(flag.startswith(_PATIENCE) for flag in flags):
        flags.append(f"{_PATIENCE}=600")
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_DEVICE_COUNT}={num_devices}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)  # JAX refuses two answers to one question


def a_device_a_core() -> None:
    """Let the CPU be as many devices as it has cores, where nobody has said how many it is.

    A program over these devices uses all cores, where one on a single device often keeps one busy.
    Accelerators are left alone; without effect once JAX has looked for its devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT in flags or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    if _PATIENCE not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_PATIENCE}=600".strip()
    if "jax" in sys.modules:
        import jax

        with suppress(RuntimeError):  # it has looked
            jax.config.update("jax_num_cpu_devices", num_cores())
    else:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(num_cores())


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def without_accelerators() -> None:
    """Look for no accelerator and let their libraries say nothing of it: they only compile."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if "jax" in sys.modules:
        import jax

        jax.config.update("jax_platforms", "cpu")


def leave_at_signals() -> None:
    """Let SIGTERM and Ctrl-C end the process at once, until the training loop takes them over.

    There is nothing to save yet, and an interpreter that is interrupted while it imports JAX may
    crash when it ends. Exit codes as later: 0 for SIGTERM, with a line that says so, and 130.
    """

    def terminated(*_: object) -> None:
        os.write(2, b"SIGTERM: no step is running, nothing to save; start it again to go on\n")
        os._exit(0)

    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(CTRL_C_EXIT_CODE))
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminated)


def keep_freed_memory() -> bool:
    """Keep memory that is freed instead of giving it back to the system; for the CPU platform only.

    A training step frees and takes the same large buffers again and again. By default glibc maps
    each anew, and the kernel clears it page by page, which costs a quarter of a step's time.
    With one arena a buffer that one thread frees serves the next, whichever thread asks.

    Returns:
        Whether it was done: false where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # Windows, macOS, musl
        return False
    done = mallopt(_M_MMAP_THRESHOLD, _LARGEST) or mallopt(_M_MMAP_MAX, 0)
    return bool(done and mallopt(_M_TRIM_THRESHOLD, _LARGEST) and mallopt(_M_ARENA_MAX, 1))


def compilation_cache(directory: str | Path | None = None) -> Path:
    """Keep compiled programs on disk, so that a restarted run does not compile again.

    JAX_COMPILATION_CACHE_DIR in the environment wins over `directory`, whose default is
    $XDG_CACHE_HOME/jaxdist/xla, or ~/.cache/jaxdist/xla. Returns the directory in use.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR") or directory or caches / "jaxdist" / "xla"
    path = Path(chosen)
    if "jax" in sys.modules:
        import jax

        jax.config.update("jax_compilation_cache_dir", str(path))
    else:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(path)
    return path


def host_peak_memory() -> int:
    """The largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux
