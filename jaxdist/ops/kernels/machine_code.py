"""Machine code of kernels, kept on disk beside XLA's programs: a second start does not compile it.

numba's own cache would, but not of closures, which is what kernels for one processor or another
are. A file holds a digest, names, and the object file.
"""

import contextlib
import functools
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import llvmlite.binding as llvm
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

_DIGEST = 32  # bytes


class MachineCode:
    """A function's machine code in memory, as long as this lives.

    Attributes:
        address: Of the entry.
    """

    def __init__(self, data: bytes) -> None:
        """data: As `_object` gives it. LookupError where it calls what is not in this process."""
        header, _, found = data.partition(b"\n")
        entry, *called = json.loads(header)
        if missing := [name for name in called if llvm.address_of_symbol(name) is None]:
            raise LookupError(f"{entry} calls {missing[0]}, which is not here")
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(found))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(entry)


def load(name: str, compiled: Callable[[], Any]) -> MachineCode:
    """The code of what `compiled` gives, by `numba.cfunc`, from JAX's compilation cache.

    name: Of the function, one for each way in which it may be compiled on one machine.
    """
    path = _path(name)
    data = None if path is None else _read(path)
    if data is not None:
        rtsys.initialize(cpu_target.target_context)  # what numba's code calls
        with contextlib.suppress(LookupError):
            return MachineCode(data)
    data = _object(compiled())
    if path is not None:
        _write(path, data)
    return MachineCode(data)


def _object(function: Any) -> bytes:
    """A line of JSON, [entry, what it calls...], and the object file."""
    module = llvm.parse_assembly(function.inspect_llvm())
    outer = [*module.functions, *module.global_variables]
    called = [each.name for each in outer if each.is_declaration and each.name[:5] != "llvm."]
    header = json.dumps([function.native_name, *called]).encode()
    return header + b"\n" + _machine().emit_object(module)


def _target() -> tuple[str, str, str]:
    """Triple, processor and features, in LLVM's words, for which numba compiles."""
    context: Any = cpu_target.target_context
    return context.codegen().magic_tuple()


def _machine() -> llvm.TargetMachine:
    """As numba has it for what runs where it is compiled."""
    triple, processor, features = _target()
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=processor, features=features, opt=3, reloc="static", codemodel="jitdefault", jit=True
    )


def _path(name: str) -> Path | None:
    """None where there is no cache, or none that is a folder."""
    settings: Any = jax.config
    folder = settings.jax_compilation_cache_dir
    if not folder or "://" in folder:
        return None
    return Path(folder) / f"{name}-{_source()[:32]}.o"


@functools.cache
def _source() -> str:
    """All that the code depends on."""
    versions = [version(name) for name in ("jaxlib", "numba", "llvmlite")]
    digest = hashlib.sha256(repr((sys.version, *versions, *_target())).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """None where it is not there, or not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, data = content[:_DIGEST], content[_DIGEST:]
    return data if hashlib.sha256(data).digest() == digest else None


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all; a cache that cannot be written costs time and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            file = Path(folder) / path.name
            file.write_bytes(hashlib.sha256(data).digest() + data)
            file.replace(path)
