"""Counts the opcodes that a process runs between two signals, and writes their number to a file.

Python imports a module of this name before anything else, from the first folder of ``PYTHONPATH`` that has one. The first
signal begins to count in the main thread, where all that is Python happens; the second one ends it. Counting makes
Python some ten times as slow, so nothing is counted before.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

TOGGLE = signal.SIGUSR2
FOLDER = "QUINTET_COUNTS"
"""Environment variable: where each process writes a file of its id."""


class Count:
    """Of one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._is_on = False

    def toggle(self, number: int, frame: FrameType | None) -> None:
        """Begin to count, or end and tell."""
        self._is_on = not self._is_on
        if self._is_on:
            self._number = 0
            while frame is not None:  # those that run already
                self._count_in(frame)
                frame = frame.f_back
            sys.settrace(self._trace)
        else:
            sys.settrace(None)
            unfinished = self._folder / f"{os.getpid()}.part"
            unfinished.write_text(str(self._number))
            unfinished.replace(unfinished.with_suffix(""))

    def _count_in(self, frame: FrameType) -> None:
        frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = self._trace, True, False

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._is_on:
            return None
        if event == "opcode":
            self._number += 1
        elif event == "call":
            self._count_in(frame)
        return self._trace


if FOLDER in os.environ:
    signal.signal(TOGGLE, Count(Path(os.environ[FOLDER])).toggle)
