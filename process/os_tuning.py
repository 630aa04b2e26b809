"""Operating-system settings of a process: standard streams, scheduling class, return of freed memory.

glibc keeps freed memory unless asked. `TRIM_MIN_BYTES` is the size from which returning it is worthwhile. Callers
decide when: the tokenizer after long prompts, the frontend after large bodies and answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys


def open_standard_streams() -> None:
    """Open the null device in place of closed standard streams.

    Otherwise sockets and pipes get their descriptors, which a child process replaces by its own standard streams.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == descriptor:
                os.set_inheritable(descriptor, True)
            else:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - kept open


def set_batch_scheduling() -> None:
    """Set `SCHED_BATCH`, so that waking this thread does not preempt a computing one.

    On a fully loaded machine a woken process otherwise preempts the sender, the executor in the middle of its step.
    No effect where the system does not allow it.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


TRIM_MIN_BYTES = 1 << 20
"""Minimum size of a prompt, body or answer: processing it takes many times as much memory."""


def trim_memory() -> None:
    """Return freed memory to the system (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
