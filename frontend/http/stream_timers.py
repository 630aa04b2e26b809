"""Timers of streamed responses: keep-alive of idle streams, and the write timeout of clients that do not read.

All streams of a process share the timer of the write timeout, so that a write only stores its start time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

SWEEP_S = 0.25
DRAIN_WRITE_S = 5.0
"""Upper bound of the timeout during shutdown."""
MAX_UNREAD_BYTES = 256 << 10
"""Maximum output held for a client that does not read, as `Stream.unread_bytes` estimates it.

As much may be in the write in progress, and in the socket, which holds twice
`quintet.frontend.http.server.SEND_BUFFER_BYTES`: less than 1 MiB in all.
"""


@dataclass(slots=True, eq=False)
class Reader:
    """Client of one streamed response."""

    abort: Callable[[], None]
    unread_bytes: Callable[[], int]
    waiting_since_s: float | None = None
    """Start of the write in progress (`time.perf_counter`); None between writes."""


class WriteTimeout:
    """Aborts connections that block a write for too long, or while too much output is held.

    The writer sees a disconnect, and its requests are cancelled as usual.
    """

    def __init__(self, write_s: float, is_draining: Callable[[], bool]) -> None:
        self._write_s = write_s
        self._is_draining = is_draining
        self._readers: set[Reader] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, abort: Callable[[], None], unread_bytes: Callable[[], int]) -> Reader:
        """Watch the client of a response until `forget`."""
        reader = Reader(abort, unread_bytes)
        self._readers.add(reader)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return reader

    def forget(self, reader: Reader) -> None:
        self._readers.discard(reader)

    def end_all(self) -> None:
        """Abort every connection that blocks a write now."""
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


class KeepAliveTimer:
    """Calls ``on_silence`` after every ``interval_s`` without a write; 0 disables it.

    One timer per stream, re-armed only when it fires: a write only stores the time.
    """

    def __init__(self, interval_s: float, on_silence: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = self._loop.time()
        if interval_s > 0:
            self._timer = self._loop.call_later(interval_s, self._fire)

    def wrote(self) -> None:
        self._last_s = self._loop.time()

    def _fire(self) -> None:
        silent_s = self._loop.time() - self._last_s
        wait_s = self._interval_s - silent_s
        if wait_s <= 0.001:
            self._last_s = self._loop.time()
            self._on_silence()
            wait_s = self._interval_s
        self._timer = self._loop.call_later(wait_s, self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
