"""Locks of a server's persistent stores: a second server would misread or overwrite their files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quintet.process.own_files import open_own
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError


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
