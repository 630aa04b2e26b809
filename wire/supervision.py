"""What the supervisor and the processes tell each other: slots, signs of life, figures, orders. No request's data.

Every process knows these; the messages of requests are in `quintet.wire.messages`.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quintet.wire.ids import Role, WorkerId


class SlotState(IntEnum):
    """What the supervisor knows of one slot."""

    STARTING = 0
    READY = 1
    STALLED = 2
    DOWN = 3
    RETIRING = 4
    """Gets nothing new, finishes or hands over what it has, then leaves."""


class ProcessSlot(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One process in the topology."""

    worker: WorkerId
    address: str
    pid: int
    state: SlotState
    note: str = ""
    retired: bool = False
    """`SlotState.DOWN` on purpose: nobody waits for a successor."""
    was_ready: bool = False
    """Whether this process, or one before it, was ready once: who is missing here now is being replaced."""


class Topology(msgspec.Struct, array_like=True, tag="topology"):
    """Supervisor -> everyone, whenever a slot changes: who is there, at which epoch. Newer versions replace older ones."""

    version: int
    slots: list[ProcessSlot]
    draining: bool = False


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """Child -> supervisor: booted. ``facts`` are short words for the boot story (e.g. ``blocks: 812``)."""

    worker: WorkerId
    pid: int
    facts: dict[str, str] = {}


class Heartbeat(msgspec.Struct, array_like=True, tag="heartbeat"):
    """Child -> supervisor, every ``heartbeat_s``, from the loop that does the work; the executor's from a thread beside it."""

    worker: WorkerId
    progress: int
    """Grows whenever work is completed."""
    pending: int
    """Work accepted and not completed; with ``progress`` standing still this means a stall."""
    cpu_ns: int
    """Processor time of the process so far."""
    metrics: bytes = b""
    """Encoded `quintet.wire.metrics.Snapshot`; empty when nothing changed since the last."""
    topology: int = 0
    """Version of the topology that the worker follows; a new one is acknowledged by a heartbeat at once."""


class MetricsQuery(msgspec.Struct, array_like=True, tag="metrics_query"):
    """Frontend -> supervisor: everybody's newest figures."""

    query_id: int
    asker: WorkerId
    metrics: bytes = b""
    """The asker's own until now, as in `Heartbeat`: what it shows must outlive it. Empty when no counts are shown."""


class ReportMetrics(msgspec.Struct, array_like=True, tag="tell_figures"):
    """Supervisor -> everyone: somebody looks at the figures; send a heartbeat with yours."""


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
    """Since it was started."""
    beat_age_s: float = 0.0
    """Since its last heartbeat."""
    note: str = ""


class SlotHistory(msgspec.Struct, array_like=True):
    """Inside `MetricsReport`: what the former processes of one slot had counted. The living one began at zero."""

    role: Role
    index: int
    metrics: bytes
    """Encoded `quintet.wire.metrics.Snapshot` without gauges."""


class MetricsReport(msgspec.Struct, array_like=True, tag="metrics_report"):
    """Supervisor -> frontend: the answer."""

    query_id: int
    processes: list[ProcessMetrics]
    past: list[SlotHistory] = []
    """Of slots that lost a process, also those that are given up."""


class Drain(msgspec.Struct, array_like=True, tag="drain"):
    """Supervisor -> frontend, tokenizer, detokenizer: accept nothing new, finish what is in flight, then send `Drained`.

    In a topology that is draining the server ends; else the receiver's slot is `SlotState.RETIRING`, and others go on.
    """


class Drained(msgspec.Struct, array_like=True, tag="drained"):
    """The answer: nothing left."""

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
