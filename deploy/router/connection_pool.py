"""Connection pool of one server: keep-alive connections with one request at a time."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quintet.deploy.tools.load_client.connection import Connection, HttpAnswer, Target
from quintet.frontend.http.http_request import Header

FULL_BYTES = 256 << 10
"""Buffered bytes of a stream at which reading from the server pauses (backpressure)."""

STALE_S = 0.005
"""If a reused connection breaks within this time plus two round trips, the server had closed it before the request."""


class Unreachable(ConnectionError):
    """The connection was refused or timed out."""


@dataclass(slots=True, eq=False)
class ResponseFlow:
    """An answer in progress: its head, and the received pieces of its body."""

    connection: Connection
    whole: asyncio.Future[HttpAnswer]
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    waiter: asyncio.Future[None] | None = None
    on_piece: Callable[[bytes, float], None] = lambda payload, now_s: None
    """Called with each piece of a stream and the time (`time.perf_counter`)."""
    is_stream: bool = False
    """True once the head of a streamed answer is received."""
    sent_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    headers: Sequence[Header] = ()
    """Copy of the answer's headers: the connection may be used by another request later."""

    def feed(self, payload: bytes, now_s: float) -> None:
        """Receive a piece of a streamed body."""
        self.pieces.append(payload)
        self.num_bytes += len(payload)
        self.on_piece(payload, now_s)
        if self.num_bytes > FULL_BYTES:
            self.connection.pause(True)
        self.wake()

    def note_head(self) -> None:
        """Record the headers."""
        self.status, self.headers = self.connection.status, tuple(self.connection.headers)
        self.is_stream = self.connection.is_streaming
        self.wake()

    def wake(self, _: object = None) -> None:
        """Wake the waiting task."""
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None

    async def head(self) -> None:
        """Wait for the headers of a stream, or for a complete answer. Raises `ConnectionError`."""
        while not self.whole.done():
            if self.is_stream:
                return
            await self._wait()
        self.whole.result()

    @property
    def is_read(self) -> bool:
        """True if the answer is complete and all its pieces are taken."""
        return not self.pieces and self.whole.done() and self.whole.exception() is None

    async def take(self) -> bytes:
        """Wait for and return the next bytes of the body; empty at its end. Raises `ConnectionError`."""
        while not self.pieces:
            if self.whole.done():
                self.whole.result()
                return b""
            await self._wait()
        pieces, self.pieces = self.pieces, []
        if self.num_bytes > FULL_BYTES:
            self.connection.pause(False)
        self.num_bytes = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class ConnectionPool:
    """Connections to one server."""

    def __init__(self, target: Target, connect_s: float) -> None:
        self.target = target
        self._connect_s = connect_s
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self.last_received_s = 0.0
        """Last time (`time.perf_counter`) that a stream received anything."""
        self.last_event_s = 0.0
        """Last time that a stream received more than a keep-alive comment."""
        self.round_trip_s = 0.0
        """Connect time of the newest connection."""

    def record_piece(self, payload: bytes, now_s: float) -> None:
        """Record the time of a stream's piece."""
        self.last_received_s = now_s
        if not _is_keepalive(payload):
            self.last_event_s = now_s

    async def send(self, request: bytes, *, is_fresh: bool = False) -> ResponseFlow:
        """Send a request; ``is_fresh`` opens a new connection. Raises `Unreachable`. Later errors are raised by the flow."""
        connection = (None if is_fresh else self._take_idle()) or await self._connect()
        flow = ResponseFlow(
            connection, asyncio.get_running_loop().create_future(), on_piece=self.record_piece
        )
        flow.whole = connection.send(request, flow, flow.note_head)
        flow.whole.add_done_callback(flow.wake)
        return flow

    def was_stale(self, flow: ResponseFlow) -> bool:
        """Return whether a flow failed because the server had closed the reused connection before the request.

        Only an immediate failure counts. After a longer time, the request itself may have crashed the server.
        """
        connection = flow.connection
        took_s = time.perf_counter() - flow.sent_s
        return (
            connection.num_exchanges > 1
            and not connection.has_received
            and took_s < STALE_S + 2 * self.round_trip_s
        )

    def give_back(self, flow: ResponseFlow) -> None:
        """Reuse the connection of a complete answer; close it otherwise."""
        whole = flow.whole
        if whole.done() and not whole.cancelled() and whole.exception() is None and flow.connection.reusable:
            self._idle.append(flow.connection)
        else:
            flow.connection.close()
            whole.cancel()

    def hang_up(self) -> None:
        """Close all connections; their requests fail with `ConnectionError`."""
        for connection in list(self._open):
            connection.close()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop, target = asyncio.get_running_loop(), self.target
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), target.host, target.port, ssl=self._tls
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:
            raise Unreachable(f"no connection: {error.strerror or error}") from None
        except ValueError as error:  # an invalid host name
            raise Unreachable(f"no connection to {target.host}: {error}") from None
        self.round_trip_s = time.perf_counter() - began_s
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._open.discard(connection))
        return connection


def _is_keepalive(payload: bytes) -> bool:
    """Return whether a piece of a stream is only a keep-alive comment or ping event."""
    if payload.startswith(b":"):
        return b"\ndata:" not in payload
    return payload.startswith(b"event: ping") and payload.find(b"\n\n") == len(payload) - 2
