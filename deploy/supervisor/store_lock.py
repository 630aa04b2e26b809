"""That what a server keeps in files is its alone: names in it would mean others to a second one, or be written over by it."""

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
def alone(config: EngineConfig) -> Iterator[None]:
    """Hold the locks of all that a server keeps in files until the block or the process ends.

    Raises `ConfigError` where another process has one, or it cannot be made.
    """
    disk = config.cache.disk
    with (
        alone_with(config.frontend.response_store, "--response-store"),
        alone_with("" if disk is None else disk.folder, "--kv-disk", "/server.lock"),
    ):
        yield


@contextmanager
def alone_with(path: str, flag: str, suffix: str = ".lock") -> Iterator[None]:
    """Hold the lock of a store, ``path`` with ``suffix`` behind it, until the block or the process ends; "" has none.

    The lock is the process's: children have no part in it. The empty file stays. Raises `ConfigError` where another process
    has it, or the file cannot be made.
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
        raise ConfigError(f"{flag} {path} is kept by another server that runs: give each its own") from None
    try:
        yield
    finally:
        os.close(file)
