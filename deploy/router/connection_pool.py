"""Connection pool of one server: keep-alive connections with one request at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quintet.deploy.tools.load_client.connection import Connection, HttpAnswer, Pool, Target, Unreachable
from quintet.frontend.http.http_request import Header

FULL_BYTES = 256 << 10
"""Buffered bytes of a stream at which reading from the server pauses (backpressure)."""

STALE_S = 0.005
"""If a reused connection breaks within this time plus two round trips, the server had closed it before the request."""


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
    """Connections to one server, and the times of its streams."""

    def __init__(self, target: Target, connect_s: float) -> None:
        self.target = target
        self.connections = Pool(target, connect_s)
        self.last_received_s = 0.0
        """Last time (`time.perf_counter`) that a stream received anything."""
        self.last_event_s = 0.0
        """Last time that a stream received more than a keep-alive comment."""

    def record_piece(self, payload: bytes, now_s: float) -> None:
        """Record the time of a stream's piece."""
        self.last_received_s = now_s
        if not _is_keepalive(payload):
            self.last_event_s = now_s

    async def send(self, request: bytes, *, is_fresh: bool = False) -> ResponseFlow:
        """Send a request; ``is_fresh`` opens a new connection. Raises `Unreachable`. Later errors are raised by the flow."""
        try:
            connection = await self.connections.take(is_fresh)
        except Unreachable:
            raise
        except OSError as error:
            raise Unreachable(f"no connection: {error.strerror or error}") from None
        flow = ResponseFlow(
            connection, asyncio.get_running_loop().create_future(), on_piece=self.record_piece
        )
        flow.whole = connection.send(request, flow, flow.note_head)
        flow.whole.add_done_callback(flow.wake)
        return flow

    async def open(self, request: bytes) -> ResponseFlow:
        """Send a request and wait for the head, again if the server had closed a reused connection. Raises `ConnectionError`."""
        is_fresh = False
        while True:
            flow = await self.send(request, is_fresh=is_fresh)
            try:
                await flow.head()
            except BaseException as error:
                is_fresh = isinstance(error, ConnectionError) and self.was_stale(flow)
                self.give_back(flow)
                if not is_fresh:
                    raise
                continue
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
            and took_s < STALE_S + 2 * self.connections.round_trip_s
        )

    def give_back(self, flow: ResponseFlow) -> None:
        """Reuse the connection of a complete answer; close it otherwise."""
        whole = flow.whole
        if whole.done() and not whole.cancelled() and whole.exception() is None:
            self.connections.keep(flow.connection)
        else:
            flow.connection.close()
            whole.cancel()

    def hang_up(self) -> None:
        """Close all connections; their requests fail with `ConnectionError`."""
        self.connections.abort()


def _is_keepalive(payload: bytes) -> bool:
    """Return whether a piece of a stream is only a keep-alive comment or ping event."""
    if payload.startswith(b":"):
        return b"\ndata:" not in payload
    return payload.startswith(b"event: ping") and payload.find(b"\n\n") == len(payload) - 2
