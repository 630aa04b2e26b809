"""Trace the Python code of a process between two signals, and write the result to a file.

At its start, Python imports the first module of this name in ``PYTHONPATH``. The first signal starts the trace and the second
one ends it. Without a trace, the process runs at full speed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TOGGLE = signal.SIGUSR2
FOLDER = "QUINTET_COUNTS"
"""Environment variable: each process writes a file named by its process id into this folder."""
KIND = "QUINTET_COUNTED"
"""Environment variable: ``opcodes`` (default) or ``functions``."""


class Opcodes:
    """Count the opcodes of the main thread, which runs the hot path. Tracing makes Python about ten times slower."""

    def __init__(self) -> None:
        self._number = 0
        self._is_on = False

    def start(self, frame: FrameType | None) -> None:
        """Count from ``frame`` and its callers on."""
        self._number, self._is_on = 0, True
        while frame is not None:
            self._count_in(frame)
            frame = frame.f_back
        sys.settrace(self._trace)

    def stop(self) -> str:
        """Stop counting; return the number."""
        self._is_on = False
        sys.settrace(None)
        return str(self._number)

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


class Functions:
    """Record the functions that any thread enters: one line each with file, first line and last line, separated by tabs."""

    def __init__(self) -> None:
        self._entered: set[CodeType] = set()
        self._is_on = False
        threading.setprofile(self._profile)

    def start(self, frame: FrameType | None) -> None:
        """Start recording; ``frame`` and its callers are not recorded."""
        self._entered, self._is_on = set(), True
        sys.setprofile(self._profile)

    def stop(self) -> str:
        """Stop recording; return the table."""
        self._is_on = False
        sys.setprofile(None)
        rows = {
            (code.co_filename, code.co_firstlineno, max(line for *_, line in code.co_lines() if line))
            for code in self._entered
            if code.co_name != "<module>"
        }
        return "".join(f"{path}\t{first}\t{last}\n" for path, first, last in sorted(rows))

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._is_on and event == "call":
            self._entered.add(frame.f_code)


class Toggle:
    """Signal handler that starts a trace, or ends it and writes its result."""

    def __init__(self, trace: Opcodes | Functions, folder: Path) -> None:
        self._trace = trace
        self._folder = folder
        self._is_on = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self._is_on = not self._is_on
        if self._is_on:
            self._trace.start(frame)
            return
        unfinished = self._folder / f"{os.getpid()}.part"
        unfinished.write_text(self._trace.stop())
        unfinished.replace(unfinished.with_suffix(""))


if FOLDER in os.environ:
    kind = Functions() if os.environ.get(KIND) == "functions" else Opcodes()
    signal.signal(TOGGLE, Toggle(kind, Path(os.environ[FOLDER])))
