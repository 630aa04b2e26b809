"""Messages between supervisor and processes: slots, heartbeats, metrics and commands. No request data.

Every process handles these; `quintet.wire.messages` has the messages of requests.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quintet.wire.ids import Id, Role, WorkerId


class SlotState(IntEnum):
    """State of one slot, as known to the supervisor."""

    STARTING = 0
    READY = 1
    STALLED = 2
    DOWN = 3
    RETIRING = 4
    """Gets no new work, finishes or hands over its requests, then exits."""


class ProcessSlot(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One process in the topology."""

    worker: WorkerId
    address: str
    pid: int
    state: SlotState
    note: str = ""
    retired: bool = False
    """`SlotState.DOWN` on purpose: no successor follows."""
    was_ready: bool = False
    """This process or a predecessor was ready once. So a process missing now is being replaced."""


class Topology(msgspec.Struct, array_like=True, tag="topology"):
    """Supervisor -> all processes, whenever a slot changes: the processes and their epochs. Newer versions replace
    older ones.
    """

    version: int
    slots: list[ProcessSlot]
    draining: bool = False


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """Child -> supervisor: started. ``facts`` are short words for the startup log (e.g. ``blocks: 812``)."""

    worker: WorkerId
    pid: int
    facts: dict[str, str] = {}


class Heartbeat(msgspec.Struct, array_like=True, tag="heartbeat"):
    """Child -> supervisor, every ``heartbeat_s``, sent by the working loop; by a separate thread in the executor."""

    worker: WorkerId
    progress: int
    """Grows whenever work is completed."""
    pending: int
    """Work accepted and not completed; constant ``progress`` with pending work is a stall."""
    cpu_ns: int
    """CPU time of the process so far."""
    metrics: bytes = b""
    """Encoded `quintet.wire.metrics.Snapshot`; empty when nothing changed since the last."""
    topology: int = 0
    """Version of the worker's topology; a heartbeat acknowledges a new one at once."""


class MetricsQuery(msgspec.Struct, array_like=True, tag="metrics_query"):
    """Frontend -> supervisor: request the newest metrics of all processes."""

    query_id: Id
    asker: WorkerId
    metrics: bytes = b""
    """The asker's metrics so far, as in `Heartbeat`: the supervisor keeps them after its death. Empty without counts."""


class ReportMetrics(msgspec.Struct, array_like=True, tag="tell_figures"):
    """Supervisor -> all processes: metrics are being read; send a heartbeat with them."""


class ProcessMetrics(msgspec.Struct, array_like=True):
    """Inside `MetricsReport`: one process."""

    worker: WorkerId
    pid: int
    state: SlotState
    cpu_ns: int
    progress: int
    pending: int
    restarts: int
    metrics: bytes
    uptime_s: float = 0.0
    """Since its start."""
    beat_age_s: float = 0.0
    """Since its last heartbeat."""
    note: str = ""


class SlotHistory(msgspec.Struct, array_like=True):
    """Inside `MetricsReport`: counts of a slot's former processes. The current process started at zero."""

    role: Role
    index: int
    metrics: bytes
    """Encoded `quintet.wire.metrics.Snapshot` without gauges."""


class MetricsReport(msgspec.Struct, array_like=True, tag="metrics_report"):
    """Supervisor -> frontend: the result."""

    query_id: Id
    processes: list[ProcessMetrics]
    past: list[SlotHistory] = []
    """History of slots that lost a process, including abandoned slots."""


class Drain(msgspec.Struct, array_like=True, tag="drain"):
    """Supervisor -> frontend, tokenizer, detokenizer: accept nothing new, finish the work in flight, then send `Drained`.

    If the topology is draining, the server ends. Otherwise only the receiver's slot is `SlotState.RETIRING`.
    """


class Drained(msgspec.Struct, array_like=True, tag="drained"):
    """Reply to `Drain`: no work is left."""

    worker: WorkerId


class Command(msgspec.Struct, array_like=True, tag="command"):
    """`quintet admin` -> supervisor."""

    reply_to: str
    """Address of the asker's inbox, in the run folder."""
    words: list[str]


class CommandAnswer(msgspec.Struct, array_like=True, tag="command_answer"):
    """Supervisor -> `quintet admin`: a line of progress, or the end."""

    line: str
    is_last: bool = False
    failed: bool = False


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """Supervisor -> child: exit now, cleanly."""
