"""The folder of one server's sockets: made, marked with its owner's process id, swept when the owner is dead."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PID_FILE = "supervisor.pid"
_PREFIX = "quintet-"


def claim(run_dir: Path) -> None:
    """Mark the folder as this process's."""
    (run_dir / _PID_FILE).write_text(str(os.getpid()))


def sweep_stale(parent: Path | None = None) -> list[Path]:
    """Remove the folders of servers that were killed; return what was removed. Folders of other users stay."""
    swept = []
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        owner = _owner(path)
        if owner is not None and not _is_alive(owner):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def _owner(run_dir: Path) -> int | None:
    """Return the process id in the folder's mark; None for a folder that is not marked or not ours."""
    try:
        if run_dir.stat().st_uid != os.getuid():
            return None
        return int((run_dir / _PID_FILE).read_text())
    except (OSError, ValueError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
