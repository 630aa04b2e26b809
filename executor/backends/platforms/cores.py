"""Processors of this process: physical cores, by affinity and the CPU quota of its control groups, and NUMA nodes.

In every step all threads read all weights, with dynamic assignment of the work. So the pages of the weights are interleaved over
the nodes in use, and every node contributes its bandwidth.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import platform
from collections.abc import Collection
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


log = logging.getLogger(__name__)

MPOL_INTERLEAVE = 3
MBIND = {"x86_64": 237, "aarch64": 235}
"""System call number of Linux's mbind(2), for which the C library has no wrapper."""
MASK_BITS = 1024


def usable_nodes(affinity: set[int] | None = None, system: Path = SYSTEM) -> list[int]:
    """Return the nodes with a processor of ``affinity``; empty if the system does not list nodes.

    Default: the processors of all threads of this process, because each thread may be pinned.
    """
    allowed = _processors_of_threads() if affinity is None else affinity
    return sorted(set(nodes_of(allowed, system).values()))


def nodes_of(processors: Collection[int], system: Path = SYSTEM) -> dict[int, int]:
    """Return the node of each processor; processors that the system does not list are missing."""
    nodes = {}
    for folder in (system / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError):
            for processor in _listed((folder / "cpulist").read_text()).intersection(processors):
                nodes[processor] = int(folder.name.removeprefix("node"))
    return nodes


def interleave(address: int, size_bytes: int, nodes: list[int]) -> bool:
    """Interleave the untouched, whole pages of ``[address, address + size_bytes)`` over ``nodes``.

    Return whether the system accepts it; otherwise the reason is logged and the first touch places each page.
    """
    number = MBIND.get(platform.machine())
    if number is None or max(nodes) >= MASK_BITS:
        log.info("memory is not interleaved: no mbind(2) for %s, nodes %s", platform.machine(), nodes)
        return False
    words = (ctypes.c_uint64 * (MASK_BITS // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))
    # The kernel uses one bit less than the size argument.
    rest = (ctypes.c_long(MPOL_INTERLEAVE), words, ctypes.c_ulong(MASK_BITS + 1), ctypes.c_ulong(0))
    if libc.syscall(*arguments, *rest) == 0:
        return True
    log.info("memory is not interleaved: %s", os.strerror(ctypes.get_errno()))
    return False


def _processors_of_threads() -> set[int]:
    processors = set(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            processors |= os.sched_getaffinity(int(thread.name))
    return processors


def _listed(text: str) -> set[int]:
    """Parse a list such as ``0-3,8``."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
