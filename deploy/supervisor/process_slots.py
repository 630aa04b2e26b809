"""Process slots: one per process that should run. A replacement process fills the same slot with the next epoch.

Owns the state of each process and the version of the topology. ``watch.py`` evaluates missing heartbeats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quintet.deploy.supervisor.spawn import ChildProcess
from quintet.process.metrics_merging import merged, supervised
from quintet.process.sockets import address_of
from quintet.wire.config import ProcessesConfig
from quintet.wire.ids import Role, WorkerId
from quintet.wire.metrics import decode_snapshot, encode_snapshot
from quintet.wire.supervision import (
    Heartbeat,
    MetricsQuery,
    ProcessMetrics,
    ProcessSlot,
    ReportMetrics,
    SlotHistory,
    SlotState,
    Topology,
)


@dataclass(slots=True)
class SlotRecord:
    """Supervisor's state of one slot. Times are ``time.monotonic()``."""

    role: Role
    index: int
    external: bool = False
    """The user's program fills the slot: not spawned, not watched."""
    epoch: int = 1
    process: ChildProcess | None = None
    pid: int = 0
    state: SlotState = SlotState.DOWN
    note: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    spawned_at: float = 0.0
    ready_at: float | None = None
    last_beat: float = 0.0
    progress: int = 0
    progress_at: float = 0.0
    """Last time that work was completed or none was pending."""
    busy_at: float = 0.0
    """Last time that work was completed or some was pending."""
    pending: int = 0
    cpu_ns: int = 0
    metrics: bytes = b""
    past: bytes = b""
    """Counts of the slot's earlier processes, encoded; see `SlotHistory`."""
    topology: int = 0
    """Version of the topology that the process has acknowledged."""
    aborted_at: float | None = None
    """Time of the SIGABRT to a stalled process."""
    stopped_at: float | None = None
    """Time of the `Stop` message to the process."""
    restart_at: float | None = None
    """Scheduled time of the restart."""
    was_ready: bool = False
    """True once any process of the slot was ready."""
    is_retiring: bool = False
    """The process is being removed and not replaced."""
    is_booting_new: bool = False
    """The process was added to a serving server and is not ready yet. If it dies, the slot is retired."""
    is_drained: bool = False
    """The process has sent `Drained`."""
    deaths: deque[float] = field(default_factory=deque)
    restarts: int = 0

    @property
    def worker(self) -> WorkerId:
        """Id of the slot's current or last process."""
        return WorkerId(self.role, self.index, self.epoch)

    @property
    def is_retired(self) -> bool:
        """True if the slot has no process and gets none."""
        return self.is_retiring and self.state is SlotState.DOWN

    def fill(self, process: ChildProcess, now: float) -> None:
        """Assign a process that was just started."""
        self.process, self.pid, self.state, self.note = process, process.pid, SlotState.STARTING, ""
        self.facts, self.metrics = {}, b""
        self.spawned_at, self.ready_at, self.aborted_at, self.restart_at = now, None, None, None
        self.stopped_at = None
        self.is_retiring = self.is_booting_new = self.is_drained = False
        self.progress = self.pending = self.cpu_ns = self.topology = 0

    def became_ready(self, facts: dict[str, str], now: float) -> None:
        self.state, self.facts, self.ready_at, self.is_booting_new = SlotState.READY, facts, now, False
        self.was_ready = True
        self.last_beat = self.progress_at = self.busy_at = now

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.progress != self.progress:
            self.progress_at = self.busy_at = now
        elif heartbeat.pending:
            self.busy_at = now
        else:
            self.progress_at = now
        self.progress, self.pending, self.cpu_ns = heartbeat.progress, heartbeat.pending, heartbeat.cpu_ns
        self.metrics = heartbeat.metrics or self.metrics
        self.topology = heartbeat.topology
        self.last_beat = now

    def exclude_pause(self, seconds: float, now: float) -> None:
        """Exclude the ``seconds`` before ``now``, in which the supervisor read no messages, from all timeouts."""
        self.last_beat = min(now, self.last_beat + seconds)
        self.progress_at = min(now, self.progress_at + seconds)
        self.busy_at = min(now, self.busy_at + seconds)

    def vacate(self, note: str) -> None:
        self.process, self.state, self.note = None, SlotState.DOWN, note
        self.ready_at = self.aborted_at = self.stopped_at = None
        self.pending = 0
        self._accumulate_counts()

    def _accumulate_counts(self) -> None:
        """Add the process's counts to the slot's past; its replacement counts from zero."""
        restarts = self.restarts if self.is_retiring else 0  # a filled slot reports its restarts itself
        parts = (self.past, self.metrics, supervised(self.cpu_ns, restarts).encoded())
        counts = merged(map(decode_snapshot, parts))
        counts.gauges.clear()
        self.past, self.metrics, self.cpu_ns = encode_snapshot(counts), b"", 0
        self.restarts -= restarts


class SlotTable:
    """All slots of one server, in start order. Slots are never removed, because an epoch must not be reused."""

    def __init__(self, run_dir: Path, processes: ProcessesConfig) -> None:
        self._run_dir = run_dir
        self.version = 0
        """Version of the newest topology."""
        self.is_changed = True
        """True if the topology changed since the last publication."""
        counts = (
            (Role.EXECUTOR, processes.engines),
            (Role.CORE, processes.engines),
            (Role.TOKENIZER, processes.tokenizers),
            (Role.DETOKENIZER, processes.detokenizers),
            (Role.FRONTEND, processes.frontends),
        )
        self._slots = {
            (role, index): SlotRecord(role, index) for role, count in counts for index in range(count)
        }
        for index in range(processes.frontends, processes.frontends + processes.external_frontends):
            self._slots[Role.FRONTEND, index] = SlotRecord(
                Role.FRONTEND, index, external=True, state=SlotState.READY
            )

    def __iter__(self) -> Iterator[SlotRecord]:
        return iter(self._slots.values())

    def own(self) -> list[SlotRecord]:
        """Return the slots with processes of the supervisor."""
        return [slot for slot in self if not slot.external]

    def active(self, role: Role) -> list[SlotRecord]:
        """Return the role's slots that are not retiring."""
        return [slot for slot in self.own() if slot.role is role and not slot.is_retiring]

    def of(self, worker: WorkerId) -> SlotRecord | None:
        """Return the slot of ``worker``; None for a process of an earlier epoch."""
        slot = self._slots.get((worker.role, worker.index))
        return slot if slot is not None and slot.worker == worker else None

    def allocate(self, *roles: Role) -> list[SlotRecord]:
        """Allocate one slot per role, all with the same index. Retired slots are reused with the next epoch."""
        index = 0
        while not all(self._is_free(role, index) for role in roles):
            index += 1
        slots = []
        for role in roles:
            slot = self._slots.get((role, index))
            if slot is None:
                slot = self._slots[role, index] = SlotRecord(role, index)
            else:
                slot.epoch += 1
            slots.append(slot)
        return slots

    def _is_free(self, role: Role, index: int) -> bool:
        slot = self._slots.get((role, index))
        return slot is None or slot.is_retired

    def is_acknowledged(self) -> bool:
        """True if every ready process has acknowledged the current topology."""
        return not self.is_changed and all(
            slot.topology == self.version for slot in self.own() if slot.state is SlotState.READY
        )

    def topology(self, draining: bool) -> Topology:
        """Return a new version of the topology."""
        self.version += 1
        self.is_changed = False
        return Topology(self.version, [self._slot(slot) for slot in self], draining)

    def _slot(self, slot: SlotRecord) -> ProcessSlot:
        is_leaving = slot.is_retiring and slot.state is not SlotState.DOWN
        state = SlotState.RETIRING if is_leaving else slot.state
        address = address_of(self._run_dir, slot.worker)
        return ProcessSlot(slot.worker, address, slot.pid, state, slot.note, slot.is_retired, slot.was_ready)

    def past(self) -> list[SlotHistory]:
        """Return the counts of exited processes."""
        return [SlotHistory(slot.role, slot.index, slot.past) for slot in self if slot.past]

    def process_metrics(self, now: float) -> list[ProcessMetrics]:
        """Return the newest metrics of all processes."""
        return [
            ProcessMetrics(
                slot.worker,
                slot.pid,
                self._slot(slot).state,
                slot.cpu_ns,
                slot.progress,
                slot.pending,
                slot.restarts,
                slot.metrics,
                now - slot.spawned_at if slot.process is not None else 0.0,
                now - slot.last_beat if slot.ready_at is not None else 0.0,
                slot.note,
            )
            for slot in self
            if not slot.external and not slot.is_retired
        ]


REPORT_TIMEOUT_S = 0.05


@dataclass(slots=True)
class _PendingQuery:
    query: MetricsQuery
    awaited: set[WorkerId]
    until: float


class MetricsRefresh:
    """Pending metrics queries and the processes that each waits for."""

    def __init__(self, slots: SlotTable, send: Callable[[Role, int, msgspec.Struct], bool]) -> None:
        self._slots = slots
        self._send = send
        self._waiting: list[_PendingQuery] = []

    def ask(self, query: MetricsQuery, now: float) -> None:
        """Request metrics from all processes. The query does not wait for executors: a step may take seconds."""
        awaited: set[WorkerId] = set()
        for slot in self._slots.own():
            if slot.process is not None and slot.ready_at is not None and slot.worker != query.asker:
                self._send(slot.role, slot.index, ReportMetrics())
                if slot.role is not Role.EXECUTOR:
                    awaited.add(slot.worker)
        self._waiting.append(_PendingQuery(query, awaited, now + REPORT_TIMEOUT_S))

    def record_heartbeat(self, worker: WorkerId) -> None:
        for pending in self._waiting:
            pending.awaited.discard(worker)

    def take(self, now: float) -> list[MetricsQuery]:
        """Remove and return the queries that are complete or timed out."""
        due = [pending.query for pending in self._waiting if not pending.awaited or pending.until <= now]
        if due:
            self._waiting = [pending for pending in self._waiting if pending.awaited and pending.until > now]
        return due

    def remaining_s(self, now: float) -> float | None:
        """Return the seconds until the next timeout; None without pending queries."""
        return max(0.0, min(pending.until for pending in self._waiting) - now) if self._waiting else None
