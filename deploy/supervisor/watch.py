"""Stall detection by heartbeats.

Every ``heartbeat_s`` a process reports its completed and its pending work. The watch does not track requests.

    heartbeats, and progress or no pending work        READY
    no heartbeat or no progress for ``notice_s``       STALLED: reported by /health and /readyz
    no heartbeat for ``stall_s``, or no progress for   SIGABRT (dumps the stacks to the log), then SIGKILL; the
    `HUNG_FACTOR` times as long                      supervisor restarts it like any dead process

The core waits for the executor. It counts as stalled only if the executor was idle for the same time, that is if a plan
or a result was lost. A step of minutes, or a hung executor, does not stall the core.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path

from quintet.deploy.supervisor.process_slots import SlotRecord, SlotTable
from quintet.wire.config import ProcessesConfig
from quintet.wire.ids import Role
from quintet.wire.supervision import SlotState

PROC = Path("/proc")
ABORT_GRACE_S = 2.0
"""Between SIGABRT (dump the stacks) and SIGKILL."""
STOP_GRACE_S = 3.0
"""Between `Stop` and SIGKILL."""
HUNG_FACTOR = 3
"""Multiple of ``stall_s`` for a process with heartbeats: one torch operation on a large model may take seconds."""
STARVED_FACTOR = 6
"""Multiple of ``stall_s`` for a process that waits for a processor most of the time."""
LOOP_PAUSE_S = 0.8
"""If the supervisor's loop pauses for longer, heartbeats were not read, and the pause is excluded from timeouts."""


class Watch:
    """Checks every slot in every iteration of the supervisor's loop."""

    def __init__(
        self,
        slots: SlotTable,
        processes: ProcessesConfig,
        waited_ns: Callable[[int], int] | None = None,
    ) -> None:
        """``waited_ns`` maps a process id to its total wait for a processor so far, in nanoseconds."""
        self._slots = slots
        self._processes = processes
        self._read_waited_ns = waited_ns or waited_for_processor_ns
        self._log = logging.getLogger("quintet")
        self._checked_at: float | None = None
        self._waited_ns: dict[int, tuple[float, int]] = {}
        """Per process in trouble: start of the observation, and its total wait for a processor at that time."""

    def check(self, now: float) -> None:
        """Mark stalls and recoveries, and abort processes that exceed their timeouts."""
        if self._checked_at is not None and now - self._checked_at > LOOP_PAUSE_S:
            for slot in self._slots.own():
                slot.exclude_pause(now - self._checked_at, now)
        self._checked_at = now
        for slot in self._slots.own():
            if slot.process is not None:
                self._check_slot(slot, now)

    def _check_slot(self, slot: SlotRecord, now: float) -> None:
        assert slot.process is not None
        limits = self._processes
        if slot.aborted_at is not None:
            if now - slot.aborted_at > ABORT_GRACE_S:
                slot.process.kill()
        elif slot.stopped_at is not None:
            if now - slot.stopped_at > STOP_GRACE_S:
                slot.process.kill()
        elif slot.state is SlotState.STARTING:
            if now - slot.spawned_at > limits.boot_timeout_s:
                self._abort(slot, now, f"not ready within {limits.boot_timeout_s:g} s")
        else:
            self._check_progress(slot, now)

    def _check_progress(self, slot: SlotRecord, now: float) -> None:
        limits = self._processes
        trouble = self.trouble(slot, now, limits.notice_s, limits.notice_s)
        if not trouble:
            self._waited_ns.pop(slot.pid, None)
        elif self.trouble(slot, now, limits.stall_s, limits.stall_s * HUNG_FACTOR) and not self._is_starved(
            slot, now
        ):
            self._abort(slot, now, trouble)
            return
        state = SlotState.STALLED if trouble else SlotState.READY
        if state is not slot.state:
            slot.state, slot.note = state, trouble
            self._slots.is_changed = True
            self._log.warning("%s: %s", slot.worker, f"stalled: {trouble}" if trouble else "recovered")

    def trouble(self, slot: SlotRecord, now: float, silent_s: float, stuck_s: float) -> str:
        """Describe a missing heartbeat or missing progress beyond the limits; empty if neither applies."""
        if now - slot.last_beat > silent_s:
            return f"no heartbeat for {now - slot.last_beat:.1f} s"
        is_stuck = slot.pending > 0 and now - slot.progress_at > stuck_s
        if not is_stuck or (slot.role is Role.CORE and not self._is_executor_idle(slot.index, now, stuck_s)):
            return ""
        return f"{slot.pending} pending, none completed for {now - slot.progress_at:.1f} s"

    def _is_executor_idle(self, engine: int, now: float, limit_s: float) -> bool:
        """Return whether the engine's executor is ready and was idle for ``limit_s``."""
        return all(
            slot.state is SlotState.READY and slot.pending == 0 and now - slot.busy_at > limit_s
            for slot in self._slots.own()
            if slot.role is Role.EXECUTOR and slot.index == engine
        )

    def _is_starved(self, slot: SlotRecord, now: float) -> bool:
        """Return whether the process mostly waits for a processor: the machine is overloaded, the process not hung."""
        waited_ns = self._read_waited_ns(slot.pid)
        since, before_ns = self._waited_ns.setdefault(slot.pid, (now, waited_ns))
        limit_s = self._processes.stall_s
        if now - min(slot.last_beat, slot.progress_at) > limit_s * STARVED_FACTOR:
            return False
        watched_s = now - since
        if watched_s < limit_s / 10:
            return True  # too short an observation
        return (waited_ns - before_ns) * 1e-9 > watched_s / 2

    def _abort(self, slot: SlotRecord, now: float, reason: str) -> None:
        """Send SIGABRT, which dumps the stacks and ends the process. SIGCONT wakes a stopped process first."""
        assert slot.process is not None
        self._log.error("%s: %s; aborting it (its stack follows)", slot.worker, reason)
        self._waited_ns.pop(slot.pid, None)
        slot.aborted_at, slot.note, slot.state = now, reason, SlotState.STALLED
        self._slots.is_changed = True
        slot.process.send_signal(signal.SIGABRT)
        slot.process.send_signal(signal.SIGCONT)


def waited_for_processor_ns(pid: int, proc: Path = PROC) -> int:
    """Return the longest run-queue wait of any thread of the process or its descendants (Linux), in nanoseconds.

    Descendants count because an executor waits for its other ranks, which are its children. 0 if unknown.
    """
    waited_ns, children = 0, []
    try:
        tasks = list((proc / str(pid) / "task").iterdir())
    except OSError:  # the process has ended, or no descriptor is free
        return 0
    for task in tasks:
        try:
            waited_ns = max(waited_ns, int((task / "schedstat").read_text().split()[1]))
            children += (task / "children").read_text().split()
        except (OSError, ValueError, IndexError):
            continue
    return max([waited_ns, *(waited_for_processor_ns(int(child), proc) for child in children)])
