"""A lock that other timed work on the machine respects, held for a stretch of measurements and handed on between two."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

YIELD_S = 1.0
"""Pause after a turn: a process that waits for the lock would not get it if it were taken again at once."""


class Turns:
    """Turns on the machine, from a file. Without a file it is always ours."""

    def __init__(self, path: Path | None, hold_s: float) -> None:
        self._path = path
        self._hold_s = hold_s
        self._held: IO[str] | None = None
        self._since_s = 0.0

    def take(self) -> None:
        """Wait for our turn, unless it is."""
        if self._path is None or self._held is not None:
            return
        file = self._path.open("a")
        fcntl.flock(file, fcntl.LOCK_EX)
        self._held, self._since_s = file, time.monotonic()

    def pass_on(self) -> None:
        """End our turn if it has lasted long enough: call it between two measurements."""
        if self._held is not None and time.monotonic() - self._since_s >= self._hold_s:
            self.close()
            time.sleep(YIELD_S)

    def close(self) -> None:
        """End our turn."""
        if self._held is not None:
            self._held.close()
            self._held = None
