"""Connections to one server: kept while idle, one request at a time on each."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from quintet.deploy.load_client.connection import Connection, HttpAnswer, Target

FULL_BYTES = 256 << 10
"""Of a stream that its client does not take: no more is read from the server then."""


class Unreachable(ConnectionError):
    """Nobody listens there, or nobody answered in time."""


@dataclass(slots=True, eq=False)
class Flow:
    """One answer on its way: its head, and the pieces of its body that have come and were not taken."""

    connection: Connection
    whole: asyncio.Future[HttpAnswer]
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    waiter: asyncio.Future[None] | None = None
    heard_s: Callable[[float], None] = lambda now_s: None
    """Told when something came (`time.perf_counter`)."""
    is_stream: bool = False
    """Whether its head has come, and its body comes in pieces."""

    def feed(self, payload: bytes, now_s: float) -> None:
        """Take a piece of a streamed body."""
        self.pieces.append(payload)
        self.num_bytes += len(payload)
        self.heard_s(now_s)
        if self.num_bytes > FULL_BYTES:
            self.connection.pause(True)
        self.wake()

    def note_head(self) -> None:
        """The headers have come."""
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


class Lines:
    """The connections to one server."""

    def __init__(self, target: Target, connect_s: float) -> None:
        self.target = target
        self._connect_s = connect_s
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self.last_heard_s = 0.0
        """When a stream last said something (`time.perf_counter`)."""

    def _heard(self, now_s: float) -> None:
        self.last_heard_s = now_s

    async def send(self, request: bytes) -> Flow:
        """Send a request. Raises `Unreachable`; what happens later is told by the flow."""
        connection = self._take_idle() or await self._connect()
        flow = Flow(connection, asyncio.get_running_loop().create_future(), heard_s=self._heard)
        flow.whole = connection.send(request, flow, flow.note_head)
        flow.whole.add_done_callback(flow.wake)
        return flow

    def give_back(self, flow: Flow) -> None:
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
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), target.host, target.port, ssl=self._tls
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:
            raise Unreachable(f"no connection: {error.strerror or error}") from None
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._open.discard(connection))
        return connection
