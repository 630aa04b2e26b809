"""Connection to an HTTP/1.1 server: keep-alive, one request at a time. httptools parses responses.

A streamed body is passed to a `Sink` in chunks as it arrives.
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
    """Receiver of a streamed body."""

    def feed(self, payload: bytes, now_s: float) -> None:
        """Process the next chunk, received at ``now_s`` (`time.perf_counter`)."""


class BadUrl(ValueError):
    """The server URL is invalid; the message contains the reason."""


class ProtocolError(ConnectionError):
    """The peer does not speak HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class Target:
    """Server address, and headers of every request."""

    host: str
    port: int
    tls: bool
    prefix: str
    headers: tuple[tuple[str, str], ...] = ()
    uds: str = ""
    """Path of a Unix socket, instead of host and port."""
    ca_file: str = ""
    """The only trusted certificates, whatever host they name; empty for those of the system."""

    def __str__(self) -> str:
        return self.uds or f"{self.host}:{self.port}"

    @property
    def authority(self) -> str:
        """Host and port as in URLs: ``10.0.0.5:8000``, ``[fd00::5]:8000``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(
        cls, base_url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Target:
        """Parse ``http://host:port/prefix``; a trailing ``/v1`` is removed, because endpoints contain it."""
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in {"http", "https"} or not url.hostname:
            raise BadUrl(f"{base_url!r} is not a server URL; it must have the form http://127.0.0.1:8000")
        try:
            port = url.port
        except ValueError as error:
            raise BadUrl(f"{base_url!r} is not a server URL: {error}") from None
        tls = url.scheme == "https"
        all_headers = dict(headers or {})
        if api_key:
            all_headers["Authorization"] = f"Bearer {api_key}"
        prefix = url.path.rstrip("/").removesuffix("/v1")
        return cls(url.hostname, port or (443 if tls else 80), tls, prefix, tuple(all_headers.items()))

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return a whole request as bytes."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self.authority}", "Accept: */*"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if body or method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings; None without TLS."""
        if not self.tls:
            return None
        context = ssl.create_default_context(cafile=self.ca_file or None)
        context.check_hostname = not self.ca_file
        return context


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes
    """The body, unless it went to a sink."""


class Connection(asyncio.Protocol):
    """One TCP connection, carrying one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        """Parser of the current response. Calls the ``on_…`` methods, nested in `data_received`."""
        self.status = 0
        """Status of the latest response with complete headers."""
        self._sink: Sink | None = None
        self._on_head: Callable[[], None] | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the latest response, with lower-case names."""
        self._body: list[bytes] = []
        """Received chunks that were not passed to the sink."""
        self.is_streaming = False
        """True if the body of the current response goes to the sink."""
        self._has_length = False
        self._has_head = False
        self._is_whole = False
        self._keep = True
        self._done: asyncio.Future[HttpAnswer] | None = None
        self.num_exchanges = 0
        self.has_received = False
        """True if any byte of the current response has arrived."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection is closed."""

    def send(
        self, request: bytes, sink: Sink | None = None, on_head: Callable[[], None] | None = None
    ) -> asyncio.Future[HttpAnswer]:
        """Send a request and return the future of its response; the body of a 200 event stream goes to ``sink``.

        ``on_head`` is called when the headers have arrived. The future raises `ConnectionError` if the connection breaks.
        """
        assert self._transport is not None and self._done is None, "one request at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._body, self.has_received = sink, [], False
        self._on_head, self.headers = on_head, []
        self._done = self._loop.create_future()
        self.num_exchanges += 1
        self._transport.write(request)
        return self._done

    def pause(self, is_full: bool) -> None:
        """Pause or resume reading (backpressure): the receiver is slower than the sender."""
        if self._transport is not None and self._transport.is_reading() == is_full:
            (self._transport.pause_reading if is_full else self._transport.resume_reading)()

    @property
    def reusable(self) -> bool:
        """True if another request may be sent."""
        return (
            self._keep
            and self._done is None
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def close(self) -> None:
        """Close immediately; a pending request fails."""
        if self._transport is not None:
            self._transport.abort()

    # --- called by the loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a closed connection: end of a body without length, or failure of the request."""
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(None)
        if self._done is None:
            return
        if self._has_head and not self._has_length and exc is None:
            self._complete()
            return
        phase = "during the response" if self.has_received else "before a response"
        self._break(ConnectionResetError(f"the server closed the connection {phase}"))

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        parser = self._parser
        if parser is None:
            self._keep = False  # unsolicited data
            return
        self.has_received = True
        error: Exception | None = None
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as parse_error:
            error = parse_error
        if self.is_streaming and self._sink is not None and self._body:
            self._sink.feed(b"".join(self._body), now_s)
            self._body.clear()
        if self._is_whole:
            self._keep = self._keep and error is None
            self._complete()
        elif error is not None:
            message = f"the peer does not speak HTTP/1.1: {error}; it sent {data[:60]!r}"
            self._break(ProtocolError(message))
            self.close()

    # --- called by the parser ---

    def on_message_begin(self) -> None:
        if self._is_whole:
            self._keep = False  # unsolicited response
            return
        self.is_streaming = self._has_length = self._has_head = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.headers.append((name, value))
        if name == b"content-type":
            self.is_streaming = b"event-stream" in value.lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        if self._is_whole:
            return
        assert self._parser is not None
        self.status, self._has_head = self._parser.get_status_code(), True
        self.is_streaming = self.is_streaming and self.status == 200
        if self._on_head is not None and self.status >= 200:
            self._on_head()

    def on_body(self, chunk: bytes) -> None:
        """Handle a chunk of the body, without framing."""
        if not self._is_whole:
            self._body.append(chunk)

    def on_message_complete(self) -> None:
        """Handle the end of a response; 1xx responses are informational."""
        if self.status < 200:
            self._has_head = False
        elif not self._is_whole:
            assert self._parser is not None
            self._is_whole, self._keep = True, self._parser.should_keep_alive()

    # --- end of a request ---

    def _complete(self) -> None:
        done, self._done = self._done, None
        self._reset()
        if done is not None and not done.done():
            done.set_result(HttpAnswer(self.status, b"".join(self._body)))

    def _break(self, error: ConnectionError) -> None:
        done, self._done, self._keep = self._done, None, False
        self._reset()
        if done is not None and not done.done():
            done.set_exception(error)

    def _reset(self) -> None:
        self._parser = None
        self.is_streaming = self._has_length = self._has_head = self._is_whole = False
