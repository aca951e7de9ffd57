"""Folders that are built once and kept: atomic, and safe when several processes want one at once.

A folder is built under a temporary name and renamed when it is complete, so that a killed builder
leaves nothing that could be mistaken for a result. A file lock, which the kernel drops when its
holder dies, lets one process of a host build while the others wait; where the file system has no
locks, both build and the first rename wins.
"""

import errno
import os
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from jaxdist.config.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

BUILDING = ".building-"


def cache_root(chosen: str | None = None) -> Path:
    """The folder for kept data: `chosen`, else $XDG_CACHE_HOME/jaxdist, else ~/.cache/jaxdist.

    Where the default cannot be written, a folder under the system's temporary directory takes its
    place, with a line of warning; a chosen one that cannot be written is refused.
    """
    if chosen is not None:
        root = Path(os.path.expanduser(chosen))
        if not _writable(root):
            raise UsageError(f"data.cache_dir={chosen} cannot be written; choose another folder")
        return root
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxdist"
    if _writable(root):
        return root
    # The same for all processes of a user, so that they share the work.
    user = os.getuid() if hasattr(os, "getuid") else "user"
    fallback = Path(tempfile.gettempdir()) / f"jaxdist-{user}"
    print(
        f"jaxdist: warning: {root} cannot be written; tokenized data goes to {fallback}",
        file=sys.stderr,
    )
    if not _writable(fallback):
        raise UsageError(f"neither {root} nor {fallback} can be written; set data.cache_dir")
    return fallback


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, filled by `build(temporary folder)` if it is not there yet.

    `build` writes plain files into the folder it is given; what it raises goes to the caller, and
    nothing is kept.
    """
    if folder.is_dir():
        return folder
    own = f"{BUILDING}{socket.gethostname()}-"
    with _lock(folder) as alone:
        if folder.is_dir():  # another process was faster
            return folder
        if alone:
            # Left by killed builders; those of other hosts, where locks are not shared, may live.
            for leftover in folder.parent.glob(f"{folder.name}{own}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        temporary = folder.with_name(f"{folder.name}{own}{uuid.uuid4().hex[:8]}")
        temporary.mkdir(parents=True)
        try:
            build(temporary)
            _flush(temporary)
            temporary.rename(folder)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError) and folder.is_dir():
                return folder  # a process without a common lock put its own, equal one there first
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UsageError(
                    f"no space is left for {folder}; free some, or set data.cache_dir"
                ) from error
            raise
    return folder


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; False where the system or the file system has none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as stream:
        yield _locked(stream, folder)


def _locked(stream: IO[str], folder: Path) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"jaxdist: waiting for the process that makes {folder}", file=sys.stderr, flush=True)
        fcntl.flock(stream, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _flush(folder: Path) -> None:
    """Bring the files to the disk before the rename, which a power cut could otherwise outlive."""
    for file in folder.iterdir():
        with open(file, "rb+") as stream:
            os.fsync(stream.fileno())
