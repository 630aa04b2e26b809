"""The folder of one server's sockets: marked with a locked file while its supervisor lives, swept when the lock is gone."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_MARK = "supervisor.pid"
_PREFIX = "quintet-"


def claim(run_dir: Path) -> int:
    """Mark the folder as this process's until the returned descriptor is closed or the process dies.

    A lock rather than the process id is what counts: it holds across containers and is never mistaken for a
    later process. The mark appears locked, so that nobody sweeps in between.
    """
    unfinished = run_dir / f".{_MARK}"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    unfinished.rename(run_dir / _MARK)
    return descriptor


def sweep_stale(parent: Path | None = None) -> list[Path]:
    """Remove the folders of servers that were killed; return what was removed. Unmarked folders stay."""
    swept = []
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def _is_abandoned(run_dir: Path) -> bool:
    """Whether the folder is ours and marked, and nobody holds the mark."""
    try:
        if run_dir.stat().st_uid != os.getuid():
            return False
        descriptor = os.open(run_dir / _MARK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
