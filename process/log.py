"""Log format of every process: time, process, level, message."""

from __future__ import annotations

import logging
import sys

from quintet.wire.ids import WorkerId


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
