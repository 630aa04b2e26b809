"""Connection pool of one server, and the answer to each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop

from quintet.deploy.http_client.connection import Connection, HttpAnswer, Sink, Target

FULL_BYTES = 256 << 10
"""Buffered bytes of a stream at which reading from the server pauses (backpressure)."""

STALE_S = 0.005
"""If a reused connection breaks within this time plus two round trips, the server had closed it before the request."""


class Unreachable(ConnectionError):
    """The connection was refused or timed out."""


@dataclass(slots=True, eq=False)
class ResponseFlow:
    """An answer in progress: its head, and the received chunks of its body."""

    connection: Connection
    whole: asyncio.Future[HttpAnswer] = field(init=False)
    chunks: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    waiter: asyncio.Future[None] | None = None
    on_chunk: Callable[[bytes, float], None] = lambda payload, now_s: None
    """Called with each chunk of a stream and the time (`time.perf_counter`)."""
    is_stream: bool = False
    """True once the head of a streamed answer is received."""
    sent_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Copy of the answer's headers: the connection may be used by another request later."""

    def feed(self, payload: bytes, now_s: float) -> None:
        self.chunks.append(payload)
        self.num_bytes += len(payload)
        self.on_chunk(payload, now_s)
        if self.num_bytes > FULL_BYTES:
            self.connection.pause(True)
        self.wake()

    def note_head(self) -> None:
        self.status, self.headers = self.connection.status, tuple(self.connection.headers)
        self.is_stream = self.connection.is_streaming
        self.wake()

    def wake(self, _: object = None) -> None:
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
        """True if the answer is complete and all its chunks are taken."""
        return not self.chunks and self.whole.done() and self.whole.exception() is None

    async def take(self) -> bytes:
        """Wait for and return the next bytes of the body; empty at its end. Raises `ConnectionError`."""
        while not self.chunks:
            if self.whole.done():
                self.whole.result()
                return b""
            await self._wait()
        chunks, self.chunks = self.chunks, []
        if self.num_bytes > FULL_BYTES:
            self.connection.pause(False)
        self.num_bytes = 0
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class ConnectionPool:
    def __init__(self, target: Target, connect_s: float = 10.0) -> None:
        self.target = target
        self._connect_s = connect_s
        self._tls = target.tls_context()
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self.last_received_s = 0.0
        """Last time (`time.perf_counter`) that a stream received anything."""
        self.last_event_s = 0.0
        """Last time that a stream received more than a keep-alive comment."""
        self.round_trip_s = 0.0
        """Connect time of the newest connection."""

    def record_chunk(self, payload: bytes, now_s: float) -> None:
        self.last_received_s = now_s
        if not _is_keepalive(payload):
            self.last_event_s = now_s

    async def send(self, request: bytes, *, is_fresh: bool = False) -> ResponseFlow:
        """Send a request; ``is_fresh`` opens a new connection. Raises `Unreachable`. Later errors are raised by the flow."""
        connection = (None if is_fresh else self._take_idle()) or await self._connect()
        flow = ResponseFlow(connection, on_chunk=self.record_chunk)
        flow.whole = connection.send(request, flow, flow.note_head)
        flow.whole.add_done_callback(flow.wake)
        return flow

    async def open(self, request: bytes) -> ResponseFlow:
        """Send a request and wait for the head of the answer; call `give_back` later. Raises `ConnectionError`.

        A stale connection is replaced once.
        """
        is_fresh = False
        while True:
            flow = await self.send(request, is_fresh=is_fresh)
            try:
                await flow.head()
            except BaseException as error:
                self.give_back(flow)
                if is_fresh or not isinstance(error, ConnectionError) or not self.was_stale(flow):
                    raise
                is_fresh = True
            else:
                return flow

    async def exchange(
        self, request: bytes, *, is_repeatable: bool = False, sink: Sink | None = None
    ) -> HttpAnswer:
        """Send a request and return the whole answer. Raises `ConnectionError`.

        ``sink`` receives a streamed body. A stale connection is replaced once; for ``is_repeatable`` see `was_stale`.
        """
        is_fresh = False
        while True:
            connection = (None if is_fresh else self._take_idle()) or await self._connect()
            flow = ResponseFlow(connection)
            flow.whole = connection.send(request, sink)
            try:
                return await flow.whole
            except ConnectionError:
                if is_fresh or not self.was_stale(flow, is_repeatable):
                    raise
                is_fresh = True
            finally:
                self.give_back(flow)

    async def ask(
        self, method: str, path: str, body: object = None, within_s: float | None = None
    ) -> HttpAnswer:
        """Send a request with a JSON body, and return the whole answer. Raises `ConnectionError` or `TimeoutError`."""
        async with asyncio.timeout(within_s):
            return await self.exchange(json_request(self.target, method, path, body))

    def was_stale(self, flow: ResponseFlow, is_repeatable: bool = False) -> bool:
        """Return whether a flow failed because the server had closed the reused connection before the request.

        Only an immediate failure counts, unless the request ``is_repeatable``. After a longer time, the request itself may have
        crashed the server.
        """
        connection = flow.connection
        took_s = time.perf_counter() - flow.sent_s
        return (
            connection.num_exchanges > 1
            and not connection.has_received
            and (is_repeatable or took_s < STALE_S + 2 * self.round_trip_s)
        )

    def give_back(self, flow: ResponseFlow) -> None:
        """Reuse the connection of a complete answer; close it otherwise."""
        whole = flow.whole
        if whole.done() and not whole.cancelled() and whole.exception() is None and flow.connection.reusable:
            self._idle.append(flow.connection)
        else:
            flow.connection.close()
            whole.cancel()

    def close_connections(self) -> None:
        """Close all connections; their requests fail with `ConnectionError`."""
        for connection in list(self._open):
            connection.close()
        self._idle.clear()

    async def close(self) -> None:
        """Close all connections, and wait for it."""
        self.close_connections()
        if self._open:
            await asyncio.wait([connection.lost for connection in self._open])

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
                if target.uds:
                    _, connection = await loop.create_unix_connection(lambda: Connection(loop), target.uds)
                else:
                    _, connection = await loop.create_connection(
                        lambda: Connection(loop), target.host, target.port, ssl=self._tls
                    )
        except TimeoutError:
            raise Unreachable(f"no connection to {target} within {self._connect_s:g} s") from None
        except OSError as error:
            raise Unreachable(f"no connection to {target}: {error.strerror or error}") from error
        except ValueError as error:  # an invalid host name
            raise Unreachable(f"no connection to {target}: {error}") from None
        self.round_trip_s = time.perf_counter() - began_s
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._open.discard(connection))
        return connection


def _is_keepalive(payload: bytes) -> bool:
    """Return whether a chunk of a stream is only a keep-alive comment, or a ping or keepalive event."""
    if payload.startswith(b":"):
        return b"\ndata:" not in payload
    return (
        payload.startswith((b"event: ping", b"event: keepalive"))
        and payload.find(b"\n\n") == len(payload) - 2
    )


def json_request(target: Target, method: str, path: str, body: object = None) -> bytes:
    """Return a request with a JSON body; without a body if None."""
    return target.request(method, path, b"" if body is None else msgspec.json.encode(body))


def ask(target: Target, method: str, path: str, body: object = None, timeout_s: float = 30.0) -> HttpAnswer:
    """Send a single request from a blocking program. Raises `ConnectionError` or `TimeoutError`."""

    async def send() -> HttpAnswer:
        pool = ConnectionPool(target, timeout_s)
        try:
            return await pool.ask(method, path, body, timeout_s)
        finally:
            await pool.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(send())
