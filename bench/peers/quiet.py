"""Processor share of other programs during a measurement, and a wait until it is small.

Foreign time is all busy processor time less that of the processes given. What a hypervisor takes away counts as foreign.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_LOOK_S = 0.5
_PAUSE_S = 2.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ForeignMeter:
    """The share of the machine that others took since the meter was made, 0 to 1."""

    def __init__(self, own: Callable[[], Sequence[psutil.Process]]) -> None:
        self._own = own
        self._own_before_s = _times_s(own())
        self._busy_before_s, self._began_s = _busy_s(), time.perf_counter()

    def share(self) -> float:
        """Return the share until now."""
        elapsed_s = time.perf_counter() - self._began_s
        busy_s = _busy_s() - self._busy_before_s
        after_s = _times_s(self._own())
        own_s = sum(after_s[pid] - self._own_before_s.get(pid, 0.0) for pid in after_s)
        capacity_s = elapsed_s * (os.cpu_count() or 1)
        return max(0.0, busy_s - own_s) / capacity_s


def is_quiet(own: Callable[[], Sequence[psutil.Process]], allowed: float) -> bool:
    """Watch for half a second whether others take no more than ``allowed`` of the machine."""
    meter = ForeignMeter(own)
    time.sleep(_LOOK_S)
    return meter.share() <= allowed


def pause() -> None:
    """Let others get on with it before looking again."""
    time.sleep(_PAUSE_S)


def _times_s(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """Return the processor time of each process, with that of children that have ended."""
    times_s = {}
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        times_s[process.pid] = times.user + times.system + times.children_user + times.children_system
    return times_s


def _busy_s() -> float:
    """Return the time that all processors were not idle: user, nice, system, interrupts and stolen."""
    user, nice, system, _, _, irq, softirq, steal = (
        int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S
