"""The seats: one per process that should exist, filled again under the next epoch when its process dies."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quintet.wire.config import ProcessesConfig
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Heartbeat, ProcessFigures, Seat, SeatState, Topology
from quintet.wire.sockets import address_of


@dataclass(slots=True)
class SeatRecord:
    """What the supervisor knows of one seat. Times are ``time.monotonic()``."""

    role: Role
    index: int
    external: bool = False
    """Filled by a process of the user's: not spawned, not watched."""
    epoch: int = 1
    process: subprocess.Popen[bytes] | None = None
    pid: int = 0
    state: SeatState = SeatState.DOWN
    note: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    spawned_at: float = 0.0
    ready_at: float | None = None
    last_beat: float = 0.0
    progress: int = 0
    progress_at: float = 0.0
    pending: int = 0
    cpu_ns: int = 0
    metrics: bytes = b""
    topology: int = 0
    """Version of the topology that the process has acknowledged."""
    aborted_at: float | None = None
    """When SIGABRT was sent to a silent process."""
    restart_at: float | None = None
    """When to fill the seat again."""
    deaths: deque[float] = field(default_factory=deque)
    restarts: int = 0

    @property
    def worker(self) -> WorkerId:
        """The process that fills the seat, or filled it last."""
        return WorkerId(self.role, self.index, self.epoch)

    def fill(self, process: subprocess.Popen[bytes], now: float) -> None:
        """Seat a process that has just been started."""
        self.process, self.pid, self.state, self.note = process, process.pid, SeatState.STARTING, ""
        self.facts, self.metrics = {}, b""
        self.spawned_at, self.ready_at, self.aborted_at, self.restart_at = now, None, None, None
        self.progress = self.pending = self.cpu_ns = self.topology = 0

    def became_ready(self, facts: dict[str, str], now: float) -> None:
        """The process says that it can work."""
        self.state, self.facts, self.ready_at = SeatState.READY, facts, now
        self.last_beat = self.progress_at = now

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """The process says that it is alive."""
        if heartbeat.progress != self.progress or heartbeat.pending == 0:
            self.progress_at = now
        self.progress, self.pending, self.cpu_ns = heartbeat.progress, heartbeat.pending, heartbeat.cpu_ns
        self.metrics = heartbeat.metrics or self.metrics
        self.topology = heartbeat.topology
        self.last_beat = now

    def is_stuck(self, now: float, stall_s: float) -> bool:
        """Whether work is pending and none was completed, or nothing was heard, for ``stall_s``."""
        return now - self.last_beat > stall_s or (self.pending > 0 and now - self.progress_at > stall_s)

    def vacate(self, note: str) -> None:
        """The process is gone."""
        self.process, self.state, self.note, self.ready_at, self.aborted_at = (
            None,
            SeatState.DOWN,
            note,
            None,
            None,
        )


class SeatTable:
    """All seats of one server, in the order in which they are started."""

    def __init__(self, run_dir: Path, processes: ProcessesConfig) -> None:
        self._run_dir = run_dir
        self._version = 0
        counts = (
            (Role.EXECUTOR, 1),
            (Role.CORE, 1),
            (Role.TOKENIZER, processes.tokenizers),
            (Role.DETOKENIZER, processes.detokenizers),
            (Role.FRONTEND, processes.frontends),
        )
        self._seats = {
            (role, index): SeatRecord(role, index) for role, count in counts for index in range(count)
        }
        for index in range(processes.frontends, processes.frontends + processes.external_frontends):
            self._seats[Role.FRONTEND, index] = SeatRecord(
                Role.FRONTEND, index, external=True, state=SeatState.READY
            )

    def __iter__(self) -> Iterator[SeatRecord]:
        return iter(self._seats.values())

    def own(self) -> list[SeatRecord]:
        """Return the seats that the supervisor fills."""
        return [seat for seat in self if not seat.external]

    def of(self, worker: WorkerId) -> SeatRecord | None:
        """Return the seat that ``worker`` fills now; None for a process of an earlier epoch."""
        seat = self._seats.get((worker.role, worker.index))
        return seat if seat is not None and seat.worker == worker else None

    @property
    def version(self) -> int:
        """Version of the newest topology."""
        return self._version

    def topology(self, draining: bool) -> Topology:
        """Return a new version of the topology."""
        self._version += 1
        return Topology(
            self._version,
            [
                Seat(seat.worker, address_of(self._run_dir, seat.worker), seat.pid, seat.state, seat.note)
                for seat in self
            ],
            draining,
        )

    def figures(self) -> list[ProcessFigures]:
        """Return everybody's newest figures."""
        return [
            ProcessFigures(
                seat.worker,
                seat.pid,
                seat.state,
                seat.cpu_ns,
                seat.progress,
                seat.pending,
                seat.restarts,
                seat.metrics,
            )
            for seat in self
            if not seat.external
        ]
