"""HTTP/1 connection over uvicorn's protocol: idle, header and write timeouts, size limits, upgrade offers, HTTP/1.0.

Body timeouts are in `quintet.frontend.http.bodies`, those of streams in `quintet.frontend.http.stream_timers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quintet.frontend.http.connection_close import HalfOpen, close_delimited
from quintet.frontend.http.error_shape import ErrorShape, bare_response
from quintet.frontend.http.http_request import CONNECTION
from quintet.wire.errors import ErrorCode, RequestError, invalid

IDLE_S = 120
"""Keep-alive timeout, above the 90 s of Go's clients; also before the first request, and after an early response."""
MAX_HEADER_BYTES = 64 << 10
"""Maximum bytes of the request line and headers, and of the trailers; uvicorn sets no limit."""
MAX_PIPELINED = 64
"""Maximum requests that wait for the response before them; a connection with more is reset."""
UPGRADE = b"upgrade"


class Protocol(HttpToolsProtocol):
    """Uvicorn's protocol with a header timeout and a write timeout.

    The application receives ``abort`` for streams. Output left to the transport must shrink every ``write_timeout_s``.
    The head of a request must be complete ``header_timeout_s`` after its first byte.
    """

    def __init__(
        self, *, write_timeout_s: float, header_timeout_s: float, errors: ErrorShape, **given_by_uvicorn: Any
    ) -> None:
        """``errors``: format of errors of requests that do not reach the application."""
        super().__init__(**given_by_uvicorn)
        self._errors = errors
        self._write_timeout_s = write_timeout_s
        self._header_timeout_s = header_timeout_s
        self._unread_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request being answered; ``cycle`` is the newest one."""
        self._is_in_body = False
        """True between the head and the end of a message."""
        self._num_framing_bytes = 0
        """Bytes of an incomplete head, or since the last chunk of a body."""
        self._half_open: HalfOpen | None = None
        self._callbacks: dict[str, Callable[[], None]] = {}
        """Callbacks between the connection and the application for this request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timeout before the first request."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(IDLE_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every timer, and disconnect the running request. Uvicorn disconnects only the newest request."""
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._unset_keepalive_if_required()
        self._stop_watching()
        self._end_head()
        if self._half_open is not None:
            self._half_open.stop()

    # --- half-closed connections ------------------------------------------------------------------------------

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep a half-closed connection open for the response to a complete request, if its client can be probed.

        TLS has no half-closed connections, and HTTP before 1.1 no interim responses.
        """
        cycle = self.cycle
        if (
            self.scheme == "https"
            or cycle is None
            or cycle.response_complete
            or cycle.more_body
            or self.pipeline
            or self._head_timer is not None
            or cycle.scope["http_version"] != "1.1"
        ):
            return None
        cycle.keep_alive = False
        self._half_open = HalfOpen(self.transport, self._probe)
        return True

    def _probe(self) -> None:
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif "break_silence" in self._callbacks:
            self._callbacks["break_silence"]()

    # --- slow senders -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse data, and enforce the size limit of an incomplete head and of trailers.

        The idle timeout continues until a message begins: neither blank lines nor the rest of a body extend it.
        """
        self._num_framing_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._reject(_not_http(error, self.parser.get_method()))
            return
        is_in_head = self._head_timer is not None
        if (is_in_head or self._is_in_body) and self._num_framing_bytes > MAX_HEADER_BYTES:
            what = "headers" if is_in_head else "trailers or chunk extensions"
            self._reject(
                RequestError(
                    ErrorCode.HEAD_TOO_LARGE,
                    f"The request's {what} exceed {MAX_HEADER_BYTES} bytes; send fewer or shorter ones.",
                )
            )

    def _parse(self, data: bytes) -> None:
        """Parse data and ignore upgrade offers (RFC 9110, section 7.8). Raises `httptools.HttpParserError`.

        The parser stops after a head that offers an upgrade, and treats the rest as another protocol. A new parser gets the same
        head without the offer, then the rest.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as stop:
                rest = rest[stop.args[0] :]
                if not self._offers_upgrade():  # CONNECT
                    return
                head = self._head_without_offer()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
                self.parser.feed_data(head)
            else:
                return

    def _offers_upgrade(self) -> bool:
        """Test whether the parsed head offers another protocol, e.g. ``Upgrade: h2c`` from Java."""
        return bool(self.parser.should_upgrade()) and any(name == UPGRADE for name, _ in self.headers)

    def _head_without_offer(self) -> bytes:
        """Return the parsed head without its Upgrade header."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != UPGRADE]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Replace the idle timeout by the header timeout; add the connection's callbacks to the request's scope."""
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._callbacks = {"abort": self.transport.abort}
        self.scope["extensions"] = {CONNECTION: cast(dict[object, object], self._callbacks)}
        self._head_timer = self.loop.call_later(self._header_timeout_s, self._give_up_on_head)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header of the head. Trailers are ignored (RFC 9110, section 6.5.1)."""
        if self._head_timer is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the header timeout; start the request, unless its head is parsed again (`_parse`)."""
        self._end_head()
        if self._offers_upgrade():
            return
        super().on_headers_complete()
        self._is_in_body, self._num_framing_bytes = True, 0
        if not self.pipeline:
            self._running = self.cycle
        elif len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # otherwise a disconnect is not detected
        else:
            self.transport.abort()
        if self.scope["http_version"] == "1.0":
            close_delimited(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Add a chunk to the body of the request."""
        self._num_framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of a body, unless the parser only stopped at an upgrade offer."""
        if self._offers_upgrade():
            return
        super().on_message_complete()
        self._is_in_body, self._num_framing_bytes = False, 0
        if self.cycle.response_complete:  # an early response
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Start the next pipelined request or the idle timeout, unless the next head is being received."""
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self._head_timer is not None:
            self._unset_keepalive_if_required()

    def _give_up_on_head(self) -> None:
        self._reject(
            RequestError(
                ErrorCode.TIMEOUT,
                f"The request's headers were not complete {self._header_timeout_s:g} s after the first byte. Send the "
                "request again without delay.",
            )
        )

    def _reject(self, error: RequestError) -> None:
        """Reject an incomplete request and close. If it has a response, or one is in progress, only close."""
        cycle, is_body = self.cycle, self._is_in_body
        self._end_head()
        if self.transport.is_closing():
            return
        is_answered = cycle is None or cycle.response_complete
        if is_answered and is_body:
            self.transport.close()
        elif is_answered or (is_body and not cycle.response_started and not self.pipeline):
            self.transport.write(bare_response(error, self._errors))
            self.transport.close()
        else:
            self.transport.abort()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # --- slow readers -----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Start the write timeout: the transport's buffer is full."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """Stop the write timeout."""
        super().resume_writing()
        self._stop_watching()

    def _watch_unread(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self._write_timeout_s, self._check_unread, size)

    def _check_unread(self, last_size: int) -> None:
        if self.transport.get_write_buffer_size() < last_size:
            self._watch_unread()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def _not_http(error: httptools.HttpParserError, method: bytes) -> RequestError:
    """Build the error for bytes that are no HTTP/1 request."""
    if method == b"PRI":
        words = "The connection started with HTTP/2; this server supports only HTTP/1.1. Configure the client for HTTP/1.1."
    else:
        words = f"Not an HTTP/1.1 request: {error}. Check the URL's scheme, the request line and the headers."
    return invalid(words)
