"""Judges the processes by their heartbeats: who stalls, and who must be replaced.

Knows nothing of requests: only that a process says, every ``heartbeat_s``, how much it has completed and how much it still has.

    heartbeats, and progress or nothing to do          READY
    silence or no progress for ``notice_s``            STALLED: /health and /readyz name it
    silence for ``stall_s``, or no progress for        SIGABRT (its stacks go to the log), then SIGKILL; the death is noticed
    `HUNG_PATIENCE` times as long                      like any other, and its slot filled again

The core is one whose work others do: it waits for the executor. So it stalls only when the executor has had nothing to do
for as long (a plan or result was lost); a step that takes minutes, or an executor that hangs, is no fault of the core's.
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
HUNG_PATIENCE = 3
"""Who still beats may only be slow: torch without the compiled kernels on a large model completes an operation in seconds."""
STARVED_PATIENCE = 6
"""A process that waits for a processor all the time is given so many times ``stall_s``."""
NODDED_OFF_S = 0.8
"""The loop wakes several times a second; when it did not for this long, nobody was heard, whoever spoke."""


class Watch:
    """Looks at every slot, once per turn of the supervisor's loop."""

    def __init__(
        self,
        slots: SlotTable,
        processes: ProcessesConfig,
        waited_ns: Callable[[int], int] | None = None,
    ) -> None:
        """``waited_ns`` tells how long a process waited for a processor so far, by its id."""
        self._slots = slots
        self._processes = processes
        self._ask_waited_ns = waited_ns or waited_for_processor_ns
        self._log = logging.getLogger("quintet")
        self._looked_at: float | None = None
        self._waited_ns: dict[int, tuple[float, int]] = {}
        """Of each silent process: since when it is watched, and how long it had waited for a processor until then."""

    def look(self, now: float) -> None:
        """Publish and end stalls, and end processes that are beyond hope."""
        if self._looked_at is not None and now - self._looked_at > NODDED_OFF_S:
            for slot in self._slots.own():
                slot.excuse(now - self._looked_at, now)
        self._looked_at = now
        for slot in self._slots.own():
            if slot.process is not None:
                self._look_at(slot, now)

    def _look_at(self, slot: SlotRecord, now: float) -> None:
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
            self._judge(slot, now)

    def _judge(self, slot: SlotRecord, now: float) -> None:
        limits = self._processes
        trouble = self.trouble(slot, now, limits.notice_s, limits.notice_s)
        if not trouble:
            self._waited_ns.pop(slot.pid, None)
        elif self.trouble(slot, now, limits.stall_s, limits.stall_s * HUNG_PATIENCE) and not self._is_starved(
            slot, now
        ):
            self._abort(slot, now, trouble)
            return
        state = SlotState.STALLED if trouble else SlotState.READY
        if state is not slot.state:
            slot.state, slot.note = state, trouble
            self._slots.is_changed = True
            self._log.warning("%s: %s", slot.worker, f"stalled: {trouble}" if trouble else "goes on")

    def trouble(self, slot: SlotRecord, now: float, silent_s: float, stuck_s: float) -> str:
        """Say what has been wrong with a process for longer than these limits; nothing when nothing is."""
        if now - slot.last_beat > silent_s:
            return f"no heartbeat for {now - slot.last_beat:.1f} s"
        is_stuck = slot.pending > 0 and now - slot.progress_at > stuck_s
        if not is_stuck or (slot.role is Role.CORE and not self._is_executor_idle(slot.index, now, stuck_s)):
            return ""
        return f"{slot.pending} pending, none completed for {now - slot.progress_at:.1f} s"

    def _is_executor_idle(self, engine: int, now: float, limit_s: float) -> bool:
        """Whether the executor of this engine is well and has had nothing to do for ``limit_s``."""
        return all(
            slot.state is SlotState.READY and slot.pending == 0 and now - slot.busy_at > limit_s
            for slot in self._slots.own()
            if slot.role is Role.EXECUTOR and slot.index == engine
        )

    def _is_starved(self, slot: SlotRecord, now: float) -> bool:
        """Whether a process spends its time waiting for a processor: then the machine is overloaded, not the process ill."""
        waited_ns = self._ask_waited_ns(slot.pid)
        since, before_ns = self._waited_ns.setdefault(slot.pid, (now, waited_ns))
        limit_s = self._processes.stall_s
        if now - min(slot.last_beat, slot.progress_at) > limit_s * STARVED_PATIENCE:
            return False
        watched_s = now - since
        if watched_s < limit_s / 10:
            return True  # watch for a moment before the verdict
        return (waited_ns - before_ns) * 1e-9 > watched_s / 2

    def _abort(self, slot: SlotRecord, now: float, why: str) -> None:
        """Have the process dump its stacks and end, even one that was stopped."""
        assert slot.process is not None
        self._log.error("%s: %s; aborting it (its stack follows)", slot.worker, why)
        self._waited_ns.pop(slot.pid, None)
        slot.aborted_at, slot.note, slot.state = now, why, SlotState.STALLED
        self._slots.is_changed = True
        slot.process.send_signal(signal.SIGABRT)
        slot.process.send_signal(signal.SIGCONT)


def waited_for_processor_ns(pid: int, proc: Path = PROC) -> int:
    """Return how long a thread of a process, or of its children, has been ready to run and did not (Linux).

    The one that has waited longest: an executor waits for its other ranks, which are its children. 0 where that is not known.
    """
    waited_ns, children = 0, []
    for task in (proc / str(pid) / "task").glob("*"):
        try:
            waited_ns = max(waited_ns, int((task / "schedstat").read_text().split()[1]))
            children += (task / "children").read_text().split()
        except (OSError, ValueError, IndexError):
            continue
    return max([waited_ns, *(waited_for_processor_ns(int(child), proc) for child in children)])
