"""That a file of kept responses is one server's alone: its frontends' names in it would mean others to a second one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from quintet.wire.errors import ConfigError


@contextmanager
def alone_with(path: str) -> Iterator[None]:
    """Hold the lock of a store, ``path`` with ``.lock`` behind it, until the block or the process ends; "" has none.

    The lock is the process's: children have no part in it. The empty file stays. Raises `ConfigError` where another process
    has it, or the file cannot be made.
    """
    if not path:
        yield
        return
    lock = path + ".lock"
    try:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--response-store {path}: {lock} cannot be opened ({error.strerror})") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ConfigError(
            f"--response-store {path} is kept by another server that runs: give each a file of its own"
        ) from None
    try:
        yield
    finally:
        os.close(file)
