"""Machine code on disk: compiled once, and again where a file is not what was written."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxdist.ops import kernels

if not kernels.available():
    pytest.skip(
        "no numba, or no AVX2: XLA's twins run, and are tested, instead", allow_module_level=True
    )

import numba

from jaxdist.ops.kernels import machine_code
from jaxdist.ops.kernels.machine_code import load


class Compiler:
    """Counts how often it is asked."""

    def __init__(self, addend: int):
        self.addend, self.count = addend, 0

    def __call__(self):
        """f(x) = x + addend; an error at 0."""
        self.count, addend = self.count + 1, self.addend
        decorate: Any = numba.cfunc(numba.int64(numba.int64))
        return decorate(lambda x: x + addend if x else addend // x)


def result(code: machine_code.MachineCode, x: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address)(x)


@pytest.fixture
def folder(tmp_path: Path):
    """JAX's compilation cache, empty."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


def test_code_is_compiled_once(folder):
    compiler = Compiler(3)
    codes = [load("add", compiler) for _ in range(3)]
    assert [result(code, 4) for code in codes] == [7, 7, 7]
    assert compiler.count == 1
    other = Compiler(5)
    assert result(load("add_more", other), 4) == 9
    (_, _) = folder.iterdir()


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"", lambda d: d[:-9] + bytes(9)])
def test_a_file_that_is_not_whole_is_made_anew(folder, damage):
    compiler = Compiler(3)
    load("add", compiler)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert result(load("add", compiler), 4) == 7
    assert compiler.count == 2
    assert result(load("add", compiler), 4) == 7
    assert compiler.count == 2


def test_another_processor_has_another_file(folder, monkeypatch):
    compiler = Compiler(3)
    load("add", compiler)
    triple, _, features = machine_code._target()
    monkeypatch.setattr(machine_code, "_target", lambda: (triple, "x86-64-v3", features))
    machine_code._source.cache_clear()
    load("add", compiler)
    machine_code._source.cache_clear()
    assert compiler.count == 2


@pytest.mark.parametrize("where", [None, "gs://bucket/cache", "file"])
def test_without_a_folder_it_is_compiled(folder, where, tmp_path):
    (tmp_path / "file").touch()
    where = str(tmp_path / where) if where == "file" else where
    jax.config.update("jax_compilation_cache_dir", where)
    compiler = Compiler(3)
    assert [result(load("add", compiler), 4) for _ in range(2)] == [7, 7]
    assert compiler.count == 2


def test_code_that_calls_what_is_not_here_is_made_anew(folder, monkeypatch):
    compiler = Compiler(3)
    load("add", compiler)
    monkeypatch.setattr(machine_code.llvm, "address_of_symbol", lambda name: None)
    with pytest.raises(LookupError, match="which is not here"):
        load("add", compiler)
    assert compiler.count == 2


PROGRAM = """
import sys
import jax.numpy as jnp
from jaxdist.ops.kernels import attend, machine_code
from jaxdist.ops.paged_attention import Pages, Rows

if sys.argv[1] == "read":
    machine_code._object = None
pages = Pages(jnp.ones((4, 2, 16, 16)), jnp.ones((4, 16, 2, 16)))
rows = Rows(jnp.array([5]), jnp.array([1]), jnp.array([[1, 2]]))
print(attend(jnp.ones((1, 1, 4, 16)), pages, rows, dtype=jnp.float32).sum())
"""


@pytest.mark.slow
def test_another_process_runs_what_one_has_compiled(folder):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu"}
    for how in ("write", "read"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout == "64.0\n", done.stderr
