"""File lock shared with other benchmarks on the machine, held for several measurements and released between two."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

YIELD_S = 1.0
"""Pause after a release, so that a waiting process can acquire the lock."""


class MeasurementLock:
    """Exclusive lock on a file; without a file, all methods do nothing."""

    def __init__(self, path: Path | None, hold_s: float) -> None:
        self._path = path
        self._hold_s = hold_s
        self._held: IO[str] | None = None
        self._since_s = 0.0

    def acquire(self) -> None:
        """Wait for the lock, unless it is held."""
        if self._path is None or self._held is not None:
            return
        file = self._path.open("a")
        fcntl.flock(file, fcntl.LOCK_EX)
        self._held, self._since_s = file, time.monotonic()

    def release_if_due(self) -> None:
        """Release the lock if it was held for at least ``hold_s``. Call it between two measurements."""
        if self._held is not None and time.monotonic() - self._since_s >= self._hold_s:
            self.close()
            time.sleep(YIELD_S)

    def close(self) -> None:
        """Release the lock."""
        if self._held is not None:
            self._held.close()
            self._held = None
