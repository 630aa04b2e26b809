"""I/O of a process: its sockets and a clock, or a recording of both (`quintet.process.record`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from quintet.process.record import Recorder
from quintet.process.sockets import Bus, Inbox, OpensOutboxes, Rejection, address_of
from quintet.process.wakeup import Wakeup
from quintet.wire.config import EngineConfig
from quintet.wire.ids import WorkerId
from quintet.wire.limits import largest_frame
from quintet.wire.validate import Validator


class Receives(Protocol):
    """Source of a process's messages: its `Inbox`, or a recording of one."""

    @property
    def rejected(self) -> dict[Rejection, int]:
        """Number of frames dropped."""

    def fileno(self) -> int:
        """See `Inbox.fileno`."""

    def drain(self) -> list[Any]:
        """See `Inbox.drain`."""

    def wait(self, timeout_s: float) -> list[Any]:
        """See `Inbox.wait`."""

    def add_wakeup(self, wakeup: Wakeup) -> None:
        """See `Inbox.add_wakeup`. A recording already contains the resulting messages."""

    def close(self) -> None:
        """See `Inbox.close`."""


@dataclass(frozen=True, slots=True)
class Wires:
    """I/O of a process: sockets and a clock, or a recording of both."""

    inbox: Receives
    bus: OpensOutboxes
    clock: Callable[[], int]
    """Nanoseconds. Called once per batch of messages."""
    close: Callable[[], None]


def open_wires(me: WorkerId, config: EngineConfig, accepts: Any, recorder: Recorder | None = None) -> Wires:
    """Bind the inbox of ``me`` in the run folder; record its frames if configured."""
    bus = Bus(config.run_dir)
    inbox: Inbox[Any] = Inbox(
        bus,
        address_of(config.run_dir, me),
        accepts,
        largest_frame(me.role, config),
        Validator(config).accepts,
        tap=None if recorder is None else recorder.received,
    )
    return Wires(inbox, bus, time.monotonic_ns, bus.close)
