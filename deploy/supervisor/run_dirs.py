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
        if _is_locked(path) is False:
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def claimed(parent: Path) -> list[Path]:
    """Return the folders of this user's servers that run."""
    return sorted(path for path in parent.glob(f"{_PREFIX}*") if is_claimed(path))


def is_claimed(run_dir: Path) -> bool:
    """Whether the folder is that of a running server of this user's."""
    return _is_locked(run_dir) is True


def _is_locked(run_dir: Path) -> bool | None:
    """Whether somebody holds the folder's mark; None when it is not ours or has none."""
    try:
        if run_dir.stat().st_uid != os.getuid():
            return None
        descriptor = os.open(run_dir / _MARK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
