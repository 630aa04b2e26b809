"""Log format of every process: time, process, level, message."""

from __future__ import annotations

import logging
import sys
import time

from quintet.wire.ids import WorkerId

INTERVAL_S = 60.0


def configure_logging(worker: WorkerId | str, level: str) -> logging.Logger:
    """Send this process's log to stderr, each line naming the process and its epoch; return the ``quintet`` logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {worker!s:<15} %(levelname)-7s %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logger = logging.getLogger("quintet")
    logger.setLevel(level)
    return logger


class LogLimit:
    """Limits a log line about repeated events to one per `INTERVAL_S`."""

    def __init__(self) -> None:
        self._num_unlogged = 0
        self._quiet_until_s = 0.0

    def count(self) -> int:
        """Count an event; return the number of events since the last line if a line is due now, otherwise 0."""
        self._num_unlogged += 1
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return 0
        self._quiet_until_s = now_s + INTERVAL_S
        num_events, self._num_unlogged = self._num_unlogged, 0
        return num_events
