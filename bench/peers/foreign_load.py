"""Measure the share of CPU time that other programs use.

Foreign time is the busy time of all processors, without that of the given processes. It includes time stolen by a hypervisor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_SAMPLE_S = 0.5
_PAUSE_S = 2.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ForeignMeter:
    """Share of the machine's CPU time that other processes use after the meter's creation, 0 to 1."""

    def __init__(self, own: Callable[[], Sequence[psutil.Process]]) -> None:
        self._own = own
        self._own_before_s = _times_s(own())
        self._busy_before_s, self._began_s = _busy_s(), time.perf_counter()

    def share(self) -> float:
        """Return the share since the creation."""
        elapsed_s = time.perf_counter() - self._began_s
        busy_s = _busy_s() - self._busy_before_s
        after_s = _times_s(self._own())
        own_s = sum(after_s[pid] - self._own_before_s.get(pid, 0.0) for pid in after_s)
        capacity_s = elapsed_s * (os.cpu_count() or 1)
        return max(0.0, busy_s - own_s) / capacity_s


def is_quiet(own: Callable[[], Sequence[psutil.Process]], allowed: float) -> bool:
    """Return True if other processes use at most the share ``allowed`` for half a second."""
    meter = ForeignMeter(own)
    time.sleep(_SAMPLE_S)
    return meter.share() <= allowed


def pause() -> None:
    """Wait before the next try."""
    time.sleep(_PAUSE_S)


def _times_s(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """Return the CPU time of each process, including ended children, in seconds."""
    times_s = {}
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        times_s[process.pid] = times.user + times.system + times.children_user + times.children_system
    return times_s


def _busy_s() -> float:
    """Return the busy time of all processors, in seconds: user, nice, system, interrupts and stolen."""
    user, nice, system, _, _, irq, softirq, steal = (
        int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S
