import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdist import platform
from jaxdist.config import UsageError


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environment},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_jax_is_imported() -> None:
    assert run("import sys, jaxdist.platform; print('jax' in sys.modules)") == "False"


@pytest.mark.parametrize("before", ["", "import jax"])
def test_simulated_devices(before: str) -> None:
    code = f"{before}\nfrom jaxdist import platform\nplatform.simulate_devices(6)\n"
    code += "import jax; print(jax.default_backend(), jax.device_count())"
    flags = "--xla_force_host_platform_device_count=3 --xla_cpu_enable_fast_math=false"
    environment = {"JAX_NUM_CPU_DEVICES": "2"} if not before else {}
    assert run(code, **({} if before else {"XLA_FLAGS": flags}), **environment) == "cpu 6"


def test_a_device_a_core_where_nobody_has_said_otherwise() -> None:
    one = (
        "from jaxdist import platform\nplatform.num_cores = lambda: 3\nplatform.a_device_a_core()\n"
    )
    count = "import jax; print(jax.default_backend(), jax.device_count())"
    cpu = {"JAX_PLATFORMS": "cpu"}
    assert run(one + count, **cpu) == "cpu 3"
    assert run(f"import jax; jax.devices()\n{one}{count}", **cpu) == "cpu 1"  # it has looked
    asked = "--xla_force_host_platform_device_count=2"
    assert run(f"import jax\n{one}{count}", XLA_FLAGS=asked, **cpu) == "cpu 2"


def test_each_process_simulates_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from jaxdist import platform; platform.simulate_devices(8)\n"
    code += "import os; print(os.environ['XLA_FLAGS'])"
    assert run(code, JAX_NUM_PROCESSES="2").endswith("device_count=4")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    with pytest.raises(UsageError, match="8 simulated devices.*JAX_NUM_PROCESSES=3"):
        platform.simulate_devices(8)


def test_more_devices_than_a_cpu_can_be_are_refused() -> None:
    with pytest.raises(UsageError, match="100000 simulated devices.*smaller mesh"):
        platform.simulate_devices(100_000)


@pytest.mark.parametrize(
    ("name", "code", "said"), [("SIGINT", 130, ""), ("SIGTERM", 0, "nothing to save")]
)
def test_signals_end_at_once(name: str, code: int, said: str) -> None:
    program = "import os, signal; from jaxdist import platform; platform.leave_at_signals()\n"
    program += f"os.kill(os.getpid(), signal.{name})\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code
    assert said in done.stderr and (said or not done.stderr)


def test_ctrl_c_among_the_first_imports_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "difflib.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "jaxdist.train"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_other_flags_stay() -> None:
    code = "from jaxdist import platform; platform.simulate_devices(4)\n"
    code += "import os; print(os.environ['XLA_FLAGS'])"
    flags = "--xla_force_host_platform_device_count=3 --xla_dump_to=/x"
    got = run(code, XLA_FLAGS=flags).split()
    assert got[0] == "--xla_dump_to=/x"
    assert got[-1] == "--xla_force_host_platform_device_count=4"
    assert [flag for flag in got if "device_count" in flag] == got[-1:]


def test_busy_cores_are_not_taken_for_a_deadlock() -> None:
    code = "from jaxdist import platform; platform.simulate_devices(4)\n"
    code += "import os; print(os.environ['XLA_FLAGS'])"
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    assert f"{flag}=600" in run(code, XLA_FLAGS="")
    assert f"{flag}=5 " in run(code, XLA_FLAGS=f"{flag}=5")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept() -> None:
    # 64 MiB is above the largest threshold that glibc would choose by itself.
    code = """
import resource
from jaxdist import platform
if KEEP: assert platform.keep_freed_memory()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(2**26)
before = faults()
for _ in range(8): bytearray(2**26)
print(faults() - before)
"""
    plain, kept = (int(run(f"KEEP = {keep}\n{code}")) for keep in (False, True))
    assert kept < plain / 10


def test_compilation_cache(tmp_path: Path) -> None:
    code = f"""
from jaxdist import platform
path = platform.compilation_cache({str(tmp_path / "a")!r})
import jax
print(path == __import__("pathlib").Path(jax.config.jax_compilation_cache_dir), path.name)
"""
    assert run("import jax\n" + code) == "True a"
    assert run(code, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "b")) == "True b"


def test_peak_memory_is_in_bytes() -> None:
    block = bytearray(b"x" * 2**24)
    assert len(block) < platform.host_peak_memory() < 2**40
