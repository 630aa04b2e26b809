"""HTTP/1.1 over asyncio, only what loading a server needs: keep-alive, one request at a time. httptools reads the answers.

It knows nothing of what the bodies mean; a streamed body goes to a `Sink` piece by piece as it arrives.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools


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
            raise BadUrl(f"{base_url!r} is no address of a server; it must look like http://127.0.0.1:8000")
        try:
            port = url.port
        except ValueError as error:
            raise BadUrl(f"{base_url!r} is no address of a server: {error}") from None
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
class HttpAnswer:
    """The end of an exchange."""

    status: int
    body: bytes
    """Whole, unless it went to a sink."""


class Connection(asyncio.Protocol):
    """One TCP connection, carrying one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        """Of the answer that is awaited. It calls the methods ``on_…``, nested in `data_received`."""
        self._status = 0
        self._sink: Sink | None = None
        self._on_head: Callable[[], None] | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        """Of the newest answer, names in lower case."""
        self._body: list[bytes] = []
        """What arrived and is not at the sink."""
        self._streaming = False
        self._has_length = False
        self._has_head = False
        self._is_whole = False
        self._keep = True
        self._done: asyncio.Future[HttpAnswer] | None = None
        self.num_exchanges = 0
        self.heard = False
        """Whether any byte of the current answer has arrived."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the transport is gone."""

    def send(
        self, request: bytes, sink: Sink | None = None, on_head: Callable[[], None] | None = None
    ) -> asyncio.Future[HttpAnswer]:
        """Send a request and return the future of its answer; the body of a 200 event stream goes to ``sink``.

        ``on_head`` is called before that, when the headers have come. The future raises `ConnectionError` when the connection
        breaks first.
        """
        assert self._transport is not None and self._done is None, "one exchange at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._body, self.heard = sink, [], False
        self._on_head, self.headers = on_head, []
        self._done = self._loop.create_future()
        self.num_exchanges += 1
        self._transport.write(request)
        return self._done

    @property
    def status(self) -> int:
        """Of the newest answer whose headers have come."""
        return self._status

    @property
    def is_streaming(self) -> bool:
        """Whether the body of the current answer goes to the sink."""
        return self._streaming

    def pause(self, is_full: bool) -> None:
        """Read no more for the time being, or go on: whoever takes the answer is slower than whoever sends it."""
        if self._transport is not None and self._transport.is_reading() == is_full:
            (self._transport.pause_reading if is_full else self._transport.resume_reading)()

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

    # --- called by the loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer closed: the end of a body without a length, or a broken exchange."""
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(None)
        if self._done is None:
            return
        if self._has_head and not self._has_length and exc is None:
            self._complete()
            return
        where = "in the middle of its answer" if self.heard else "before it answered"
        self._break(ConnectionResetError(f"the server closed the connection {where}"))

    def data_received(self, data: bytes) -> None:
        """Take what arrived."""
        now_s = time.perf_counter()
        parser = self._parser
        if parser is None:
            self._keep = False  # nobody asked
            return
        self.heard = True
        error: Exception | None = None
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as what:
            error = what
        if self._streaming and self._sink is not None and self._body:
            self._sink.feed(b"".join(self._body), now_s)
            self._body.clear()
        if self._is_whole:
            self._keep = self._keep and error is None
            self._complete()
        elif error is not None:
            words = f"the peer does not speak HTTP/1.1: {error}; it sent {data[:60]!r}"
            self._break(ProtocolError(words))
            self.close()

    # --- called by the parser ---

    def on_message_begin(self) -> None:
        """An answer begins."""
        if self._is_whole:
            self._keep = False  # one more than was asked for
            return
        self._streaming = self._has_length = self._has_head = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of it."""
        name = name.lower()
        self.headers.append((name, value))
        if name == b"content-type":
            self._streaming = b"event-stream" in value.lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Its headers are whole."""
        if self._is_whole:
            return
        assert self._parser is not None
        self._status, self._has_head = self._parser.get_status_code(), True
        self._streaming = self._streaming and self._status == 200
        if self._on_head is not None and self._status >= 200:
            self._on_head()

    def on_body(self, piece: bytes) -> None:
        """A piece of its body, without the framing."""
        if not self._is_whole:
            self._body.append(piece)

    def on_message_complete(self) -> None:
        """It is whole, unless it only said that the answer will come."""
        if self._status < 200:
            self._has_head = False
        elif not self._is_whole:
            assert self._parser is not None
            self._is_whole, self._keep = True, self._parser.should_keep_alive()

    # --- the end of an exchange ---

    def _complete(self) -> None:
        done, self._done = self._done, None
        self._rest()
        if done is not None and not done.done():
            done.set_result(HttpAnswer(self._status, b"".join(self._body)))

    def _break(self, error: ConnectionError) -> None:
        done, self._done, self._keep = self._done, None, False
        self._rest()
        if done is not None and not done.done():
            done.set_exception(error)

    def _rest(self) -> None:
        self._parser = None
        self._streaming = self._has_length = self._has_head = self._is_whole = False


class Pool:
    """Connections to one target, reused when idle."""

    def __init__(self, target: Target, connect_timeout_s: float = 10.0) -> None:
        self._target = target
        self._timeout_s = connect_timeout_s
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._tls = ssl.create_default_context() if target.tls else None

    async def exchange(self, request: bytes, sink: Sink | None = None) -> HttpAnswer:
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
