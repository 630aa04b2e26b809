"""How many processor cores this process may compute on: by affinity, by the container's quota, hyperthreads counted once."""

from __future__ import annotations

import math
import os
from pathlib import Path

SYSTEM = Path("/sys")


def usable_cores(affinity: set[int] | None = None, system: Path = SYSTEM) -> int:
    """Return the number of physical cores, at least 1. ``affinity``: hardware threads allowed; by default this process's."""
    threads = os.sched_getaffinity(0) if affinity is None else affinity
    cores = len({siblings(thread, system) for thread in threads})
    quota = _quota(system)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def default_threads(num_cores: int) -> int:
    """Use every core of a small machine, and leave one in eight of a larger one to the other processes of the server.

    Threads take work piece by piece: one whose core another process took for a moment does less, and nobody waits for
    more than the piece it holds.
    """
    return num_cores - num_cores // 8


def siblings(thread: int, system: Path) -> str:
    """Return the hardware threads of one core, as the kernel writes them; just this one where it does not say."""
    try:
        path = system / f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
        return path.read_text().strip() or str(thread)
    except OSError:
        return str(thread)


def _quota(system: Path) -> float | None:
    """Return how many processors the control group may use on average; None for no limit."""
    group = system / "fs/cgroup"
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        pass
    try:
        microseconds = float((group / "cpu/cpu.cfs_quota_us").read_text())
        period_us = float((group / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return microseconds / period_us if microseconds > 0 and period_us > 0 else None
