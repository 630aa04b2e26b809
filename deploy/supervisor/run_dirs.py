"""Run folder of a server, with a locked mark file while its supervisor runs, and locks of its persistent stores.

Run folders without a lock are stale. A second server would misread or overwrite the files of a store.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quintet.process.own_files import open_own
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError

_MARK = "supervisor.pid"
_PREFIX = "quintet-"


def make_run_dir(parent: str | Path | None = None) -> Path:
    """Create a folder for one server's sockets and key, readable only by its user.

    Unix socket paths are limited to 107 bytes, so the folder is directly under ``parent`` (default: the system's
    temporary folder). Raises `ConfigError` if the folder cannot be created.
    """
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(
            f"cannot create a temporary folder ({error}); set TMPDIR to a writable folder"
        ) from None
    os.chmod(path, 0o700)
    return path


def claim(run_dir: Path) -> int:
    """Mark the folder as in use until the returned descriptor is closed or the process dies.

    The mark is a file lock, not a process id: it works across containers, and process ids are reused. The file is
    locked before the rename, so that `sweep_stale` never sees it unlocked.
    """
    unfinished = run_dir / f".{_MARK}"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    unfinished.rename(run_dir / _MARK)
    return descriptor


def sweep_stale(parent: Path | None = None) -> list[Path]:
    """Remove the folders of killed servers and return their paths. Unmarked folders are kept."""
    swept: list[Path] = []
    try:
        parent = parent or Path(tempfile.gettempdir())
    except OSError:
        return swept  # no usable temporary folder: `make_run_dir` reports it
    for path in parent.glob(f"{_PREFIX}*"):
        if _is_locked(path) is False:
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def claimed(parent: Path) -> list[Path]:
    """Return the folders of this user's running servers."""
    return sorted(path for path in parent.glob(f"{_PREFIX}*") if is_claimed(path))


def is_claimed(run_dir: Path) -> bool:
    """Return whether the folder belongs to a running server of this user."""
    return _is_locked(run_dir) is True


def _is_locked(run_dir: Path) -> bool | None:
    """Return whether the folder's mark is locked; None without a mark, or for another user's folder."""
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


@contextmanager
def lock_stores(config: EngineConfig) -> Iterator[None]:
    """Hold the locks of all persistent stores until the block or the process ends.

    Raises `ConfigError` if another process holds one, or a lock file cannot be created.
    """
    disk = config.cache.disk
    with (
        lock_store(config.frontend.response_store, "--response-store"),
        lock_store("" if disk is None else disk.folder, "--kv-disk", "/server.lock"),
    ):
        yield


@contextmanager
def lock_store(path: str, flag: str, suffix: str = ".lock") -> Iterator[None]:
    """Hold the lock of a store, the file ``path + suffix``, until the block or the process ends. An empty path has none.

    Children do not inherit the lock. The empty lock file is kept. Raises `ConfigError` if another process holds the
    lock, or the file cannot be created.
    """
    if not path:
        yield
        return
    lock = path + suffix
    try:
        Path(lock).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open_own(lock, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {lock} cannot be opened ({error.strerror})") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ConfigError(
            f"{flag} {path} is in use by another running server: give each server its own path"
        ) from None
    try:
        yield
    finally:
        os.close(file)
