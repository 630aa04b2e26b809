"""How long the server waits for a client that does not read its answer.

All streams of a process share one timer, so that a write costs no more than noting when it began.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

SWEEP_S = 0.25
DRAIN_WRITE_S = 5.0
"""While the server shuts down, a client that reads nothing holds it up no longer than this."""
MAX_UNREAD_BYTES = 256 << 10
"""Output held back for a client that does not read, as `Stream.unread_bytes` estimates it.

As much again may wait to be written, and have been written and wait for the socket, which holds twice
`quintet.frontend.http.connection.SEND_BUFFER_BYTES`: less than 1 MiB in all.
"""


@dataclass(slots=True, eq=False)
class Reader:
    """The client of one streamed answer."""

    abort: Callable[[], None]
    unread_bytes: Callable[[], int]
    waiting_since_s: float | None = None
    """When the write in progress began (`time.perf_counter`); None between writes."""


class WriteTimeout:
    """Ends the connections of readers that block a write for too long, or while too much is held back for them.

    Ending one looks like a disconnect to whoever writes: its requests are cancelled in the usual way.
    """

    def __init__(self, write_s: float, is_draining: Callable[[], bool]) -> None:
        self._write_s = write_s
        self._is_draining = is_draining
        self._readers: set[Reader] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, reader: Reader) -> None:
        """Look after a reader until `forget`."""
        self._readers.add(reader)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def forget(self, reader: Reader) -> None:
        """Leave a reader alone."""
        self._readers.discard(reader)

    def end_all(self) -> None:
        """End every connection that blocks a write now."""
        self._end_waiting(0.0)

    def _sweep(self) -> None:
        self._end_waiting(min(self._write_s, DRAIN_WRITE_S) if self._is_draining() else self._write_s)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SWEEP_S, self._sweep) if self._readers else None

    def _end_waiting(self, limit_s: float) -> None:
        now_s = time.perf_counter()
        for reader in list(self._readers):
            since_s = reader.waiting_since_s
            if since_s is not None and (
                now_s - since_s >= limit_s or reader.unread_bytes() > MAX_UNREAD_BYTES
            ):
                self._readers.discard(reader)
                reader.abort()
