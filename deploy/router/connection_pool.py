"""Connections to one server: kept while idle, one request at a time on each."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quintet.deploy.tools.load_client.connection import Connection, HttpAnswer, Target
from quintet.frontend.http.http_request import Header

FULL_BYTES = 256 << 10
"""Of a stream that its client does not take: no more is read from the server then."""

STALE_S = 0.005
"""Besides two round trips: a kept connection that breaks so soon behind a request had been closed by the server before."""


class Unreachable(ConnectionError):
    """Nobody listens there, or nobody answered in time."""


@dataclass(slots=True, eq=False)
class ResponseFlow:
    """One answer on its way: its head, and the pieces of its body that have come and were not taken."""

    connection: Connection
    whole: asyncio.Future[HttpAnswer]
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    waiter: asyncio.Future[None] | None = None
    heard: Callable[[bytes, float], None] = lambda payload, now_s: None
    """Told what came of a stream, and when (`time.perf_counter`)."""
    is_stream: bool = False
    """Whether its head has come, and its body comes in pieces."""
    sent_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    headers: Sequence[Header] = ()
    """Of its head, once that has come. They are this flow's own: its connection may have another exchange by now."""

    def feed(self, payload: bytes, now_s: float) -> None:
        """Take a piece of a streamed body."""
        self.pieces.append(payload)
        self.num_bytes += len(payload)
        self.heard(payload, now_s)
        if self.num_bytes > FULL_BYTES:
            self.connection.pause(True)
        self.wake()

    def note_head(self) -> None:
        """The headers have come."""
        self.status, self.headers = self.connection.status, tuple(self.connection.headers)
        self.is_stream = self.connection.is_streaming
        self.wake()

    def wake(self, _: object = None) -> None:
        """Let whoever waits for news look."""
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _news(self) -> None:
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None

    async def head(self) -> None:
        """Wait for the headers of a stream, or a whole answer. Raises `ConnectionError`."""
        while not self.whole.done():
            if self.is_stream:
                return
            await self._news()
        self.whole.result()

    @property
    def is_read(self) -> bool:
        """Whether nothing of it is left, nor will come."""
        return not self.pieces and self.whole.done() and self.whole.exception() is None

    async def take(self) -> bytes:
        """Return what has come of the body since it was last asked for; nothing at its end. Raises `ConnectionError`."""
        while not self.pieces:
            if self.whole.done():
                self.whole.result()
                return b""
            await self._news()
        pieces, self.pieces = self.pieces, []
        if self.num_bytes > FULL_BYTES:
            self.connection.pause(False)
        self.num_bytes = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class ConnectionPool:
    """The connections to one server."""

    def __init__(self, target: Target, connect_s: float) -> None:
        self.target = target
        self._connect_s = connect_s
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self.last_heard_s = 0.0
        """When a stream last said anything (`time.perf_counter`)."""
        self.last_told_s = 0.0
        """When one last said more than that its server is there."""
        self.round_trip_s = 0.0
        """What the newest connection took to come about."""

    def heard(self, payload: bytes, now_s: float) -> None:
        """Note a piece of a stream."""
        self.last_heard_s = now_s
        if not _says_nothing(payload):
            self.last_told_s = now_s

    async def send(self, request: bytes, *, is_fresh: bool = False) -> ResponseFlow:
        """Send a request, over a new connection if it must be ``is_fresh``. Raises `Unreachable`; the flow tells what follows."""
        connection = (None if is_fresh else self._take_idle()) or await self._connect()
        flow = ResponseFlow(connection, asyncio.get_running_loop().create_future(), heard=self.heard)
        flow.whole = connection.send(request, flow, flow.note_head)
        flow.whole.add_done_callback(flow.wake)
        return flow

    def was_stale(self, flow: ResponseFlow) -> bool:
        """Whether a flow was lost because its connection, kept from earlier, was closed already: nobody had the request.

        Only a loss at once says so: a server that had time to compute may have been lost of the request.
        """
        connection = flow.connection
        took_s = time.perf_counter() - flow.sent_s
        return (
            connection.num_exchanges > 1 and not connection.heard and took_s < STALE_S + 2 * self.round_trip_s
        )

    def give_back(self, flow: ResponseFlow) -> None:
        """Keep the connection of an answer that was read to its end; end one that was not."""
        whole = flow.whole
        if whole.done() and not whole.cancelled() and whole.exception() is None and flow.connection.reusable:
            self._idle.append(flow.connection)
        else:
            flow.connection.close()
            whole.cancel()

    def hang_up(self) -> None:
        """End every connection: whatever waits at one hears that it broke."""
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
        except ValueError as error:  # a name that no resolver can be asked for
            raise Unreachable(f"no connection to {target.host}: {error}") from None
        self.round_trip_s = time.perf_counter() - began_s
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._open.discard(connection))
        return connection


def _says_nothing(payload: bytes) -> bool:
    """Whether a piece of a stream only says that the server is there."""
    if payload.startswith(b":"):
        return b"\ndata:" not in payload
    return payload.startswith(b"event: ping") and payload.find(b"\n\n") == len(payload) - 2
