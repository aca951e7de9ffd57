"""Every test sees eight simulated CPU devices and a strict JAX."""

import gc
import os
import signal
from importlib.metadata import version

# Machine code that is not optimised compiles three times as fast; the program is the same one.
# Processes that tests start take these flags over.
QUICK = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
if version("jaxlib") < "0.11":  # later ones abort at the name
    QUICK += ("--xla_cpu_use_fusion_emitters=false",)
    # Modules split for several threads are copied for each; two workers keep two cores busy.
    QUICK += ("--xla_cpu_parallel_codegen_split_count=1",)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *QUICK)).strip()

# Without the source lines of every operation, programs lower and compile a tenth sooner.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# A shell has what it starts in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import pytest  # noqa: E402

# By jax.config and not by XLA_FLAGS, which would give eight devices to started processes too.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Share one compilation cache among the workers and the processes that tests start."""
    cache = getattr(config, "cache", None)  # absent under -p no:cacheprovider
    if cache is not None:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("jax")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    seconds = float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def pytest_collection_finish() -> None:
    """Make the devices, before a door asks for as many as there are cores.

    And leave what was imported out of every later collection of garbage, a tenth of the time.
    """
    jax.devices()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
