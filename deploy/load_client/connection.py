"""HTTP/1.1 over asyncio, only what loading a server needs: keep-alive, chunked and sized bodies, one request at a time.

It knows nothing of what the bodies mean; a streamed body goes to a `Sink` piece by piece as it arrives.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast
from urllib.parse import urlsplit

_MAX_HEAD_BYTES = 64 << 10


class Sink(Protocol):
    """Takes a streamed body."""

    def feed(self, payload: bytes, now_s: float) -> None:
        """Take the next piece, which arrived at ``now_s`` (`time.perf_counter`)."""


class BadUrl(ValueError):
    """The address of the server cannot be used; the message says why."""


class ProtocolError(ConnectionError):
    """The peer does not speak HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect, and what to send along with every request."""

    host: str
    port: int
    tls: bool
    prefix: str
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(
        cls, base_url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Target:
        """Read ``http://host:port/prefix``; a trailing ``/v1`` is dropped, because endpoints bring their own."""
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in {"http", "https"} or not url.hostname:
            raise BadUrl(f"base url is {base_url!r}; it must look like http://127.0.0.1:8000")
        try:
            port = url.port
        except ValueError as error:
            raise BadUrl(f"base url is {base_url!r}: {error}") from None
        tls = url.scheme == "https"
        sent = dict(headers or {})
        if api_key:
            sent["Authorization"] = f"Bearer {api_key}"
        prefix = url.path.rstrip("/").removesuffix("/v1")
        return cls(url.hostname, port or (443 if tls else 80), tls, prefix, tuple(sent.items()))

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return a whole request as bytes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if body or method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of an exchange."""

    status: int
    body: bytes
    """Whole, unless it went to a sink."""


class _Part(Enum):
    """Which part of the answer comes next."""

    HEAD = 0
    CHUNKS = 1
    SIZED = 2
    UNTIL_CLOSE = 3


class Connection(asyncio.Protocol):
    """One TCP connection, carrying one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._part = _Part.HEAD
        self._pending = b""
        self._left = 0
        self._status = 0
        self._sink: Sink | None = None
        self._streaming = False
        self._body: list[bytes] = []
        self._keep = True
        self._done: asyncio.Future[Answer] | None = None
        self.num_exchanges = 0
        self.heard = False
        """Whether any byte of the current answer has arrived."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the transport is gone."""

    def send(self, request: bytes, sink: Sink | None = None) -> asyncio.Future[Answer]:
        """Send a request and return the future of its answer; the body of a 200 event stream goes to ``sink``.

        The future raises `ConnectionError` when the connection breaks first.
        """
        assert self._transport is not None and self._done is None, "one exchange at a time"
        self._part, self._sink, self._streaming, self._body, self.heard = _Part.HEAD, sink, False, [], False
        self._done = self._loop.create_future()
        self.num_exchanges += 1
        self._transport.write(request)
        return self._done

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent."""
        return (
            self._keep
            and self._done is None
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def close(self) -> None:
        """Close now; a pending exchange is broken."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport (called by the loop)."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer closed (called by the loop): the end of a body without a length, or a broken exchange."""
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(None)
        if self._done is None:
            return
        if self._part is _Part.UNTIL_CLOSE and exc is None:
            self._complete()
            return
        where = "in the middle of its answer" if self.heard else "before it answered"
        self._break(ConnectionResetError(f"the server closed the connection {where}"))

    def data_received(self, data: bytes) -> None:
        """Take what arrived (called by the loop)."""
        now_s = time.perf_counter()
        self.heard = True
        if self._pending:
            data, self._pending = self._pending + data, b""
        try:
            if self._part is _Part.HEAD:
                data = self._take_head(data)
                if self._part is _Part.HEAD:
                    self._pending = data
                    return
            if self._part is _Part.CHUNKS:
                self._take_chunks(data, now_s)
            elif self._part is _Part.SIZED:
                self._take_sized(data, now_s)
            elif data:
                self._take_body(data, now_s)
        except ProtocolError as error:
            self._break(error)
            self.close()

    def _take_head(self, data: bytes) -> bytes:
        """Read status line and headers when they are whole; return what follows them."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD_BYTES or not b"HTTP/1.".startswith(data[:7]):
                raise ProtocolError(f"the peer does not speak HTTP/1.1: it sent {data[:60]!r}")
            return data
        lines = data[:end].split(b"\r\n")
        status = lines[0].split(b" ", 2)
        if not status[0].startswith(b"HTTP/1.") or len(status) < 2 or not status[1].isdigit():
            raise ProtocolError(f"the peer does not speak HTTP/1.1: it sent {lines[0][:60]!r}")
        rest = data[end + 4 :]
        self._status = int(status[1])
        if 100 <= self._status < 200:
            return self._take_head(rest)
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        self._keep = headers.get(b"connection") != b"close" and status[0] == b"HTTP/1.1"
        self._streaming = self._status == 200 and b"event-stream" in headers.get(b"content-type", b"")
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            self._part = _Part.CHUNKS
        elif b"content-length" in headers or self._status in {204, 304}:
            length = headers.get(b"content-length", b"0")
            if not length.isdigit():
                raise ProtocolError(f"the peer sent the content length {length[:30]!r}")
            self._part, self._left = _Part.SIZED, int(length)
        else:
            self._part, self._keep = _Part.UNTIL_CLOSE, False
        return rest

    def _take_chunks(self, data: bytes, now_s: float) -> None:
        position, size = 0, len(data)
        while position < size:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                break
            try:
                length = int(data[position:line_end].partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError(
                    f"the peer sent the chunk size {data[position : position + 30]!r}"
                ) from None
            start = line_end + 2
            end = start + length
            if length == 0:
                # "0 CRLF" is followed by trailer lines, if any, and an empty line
                if data.startswith(b"\r\n", start) or data.find(b"\r\n\r\n", start) >= 0:
                    self._complete()
                    return
                break
            if size < end + 2:
                break
            self._take_body(data[start:end], now_s)
            position = end + 2
        self._pending = data[position:] if position else data

    def _take_sized(self, data: bytes, now_s: float) -> None:
        self._left -= len(data)
        if data:
            self._take_body(data, now_s)
        if self._left <= 0:
            self._keep = self._keep and self._left == 0
            self._complete()

    def _take_body(self, payload: bytes, now_s: float) -> None:
        if self._streaming and self._sink is not None:
            self._sink.feed(payload, now_s)
        else:
            self._body.append(payload)

    def _complete(self) -> None:
        done, self._done, self._pending, self._part = self._done, None, b"", _Part.HEAD
        if done is not None and not done.done():
            done.set_result(Answer(self._status, b"".join(self._body)))

    def _break(self, error: ConnectionError) -> None:
        done, self._done, self._keep = self._done, None, False
        if done is not None and not done.done():
            done.set_exception(error)


class Pool:
    """Connections to one target, reused when idle."""

    def __init__(self, target: Target, connect_timeout_s: float = 10.0) -> None:
        self._target = target
        self._timeout_s = connect_timeout_s
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._tls = ssl.create_default_context() if target.tls else None

    async def exchange(self, request: bytes, sink: Sink | None = None) -> Answer:
        """Send one request over an idle or new connection and return the answer.

        A request that dies unanswered on a connection the server had kept alive was never served: it is sent once more
        over a new connection. Raises `ConnectionError` or `OSError` when the server cannot be reached or breaks off.
        """
        while True:
            connection = self._take_idle() or await self._connect()
            reused = connection.num_exchanges > 0
            try:
                answer = await connection.send(request, sink)
            except ConnectionError:
                if reused and not connection.heard:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    async def close(self) -> None:
        """Close every connection and wait until they are gone."""
        self._idle.clear()
        for connection in self._open:
            connection.close()
        if self._open:
            await asyncio.wait([connection.lost for connection in self._open])

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), self._target.host, self._target.port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectionError(
                f"no connection to {self._target.host}:{self._target.port} within {self._timeout_s:g} s"
            ) from None
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._open.discard(connection))
        return connection
