"""Number of physical cores available to this process, by affinity and the CPU quota of its control groups."""

from __future__ import annotations

import math
import os
from pathlib import Path

from quintet.process.control_groups import SYSTEM, group_folders


def usable_cores(affinity: set[int] | None = None, system: Path = SYSTEM) -> int:
    """Return the number of physical cores, at least 1. affinity: allowed hardware threads; None: those of this process."""
    threads = os.sched_getaffinity(0) if affinity is None else affinity
    cores = len({siblings(thread, system) for thread in threads})
    quota = _quota(system)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def default_threads(num_cores: int) -> int:
    """Return the number of compute threads: all cores of a small machine; 7/8 of a larger one, for the server's other processes.

    Threads take work dynamically, so a thread that loses its core for a moment delays the others by one piece at most.
    """
    return num_cores - num_cores // 8


def siblings(thread: int, system: Path) -> str:
    """Return the hardware threads of one core in the kernel's notation; only this one if the kernel does not list them."""
    try:
        path = system / f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
        return path.read_text().strip() or str(thread)
    except OSError:
        return str(thread)


def _quota(system: Path) -> float | None:
    """Return the smallest CPU quota of this process's control groups in processors; None without a limit."""
    unified, version_1 = group_folders("cpu", system)
    quotas = [*map(_unified_quota, unified), *map(_version_1_quota, version_1)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _unified_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        return None


def _version_1_quota(folder: Path) -> float | None:
    try:
        microseconds = float((folder / "cpu.cfs_quota_us").read_text())
        period_us = float((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return microseconds / period_us if microseconds > 0 and period_us > 0 else None
