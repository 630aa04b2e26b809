"""How the system schedules threads that are woken by messages."""

from __future__ import annotations

import contextlib
import os


def let_others_finish() -> None:
    """Do not interrupt whoever computes when a message wakes this thread: the system's class for batch work.

    On a machine whose cores all compute, a process that is woken otherwise takes the core of the one that woke it, the
    executor in the middle of its step. Where the system does not allow it, nothing changes.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
