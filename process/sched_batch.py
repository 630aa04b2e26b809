"""Scheduling class of processes that are woken by messages."""

from __future__ import annotations

import contextlib
import os


def set_batch_scheduling() -> None:
    """Set `SCHED_BATCH`, so that waking this thread does not preempt a computing one.

    On a fully loaded machine a woken process otherwise preempts the sender, the executor in the middle of its step.
    No effect where the system does not allow it.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
