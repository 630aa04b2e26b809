"""One HTTP/1 connection: timeouts and buffer limits for slow clients, upgrade offers, and HTTP/1.0.

Uvicorn speaks the protocol. The timeouts of bodies are in `quintet.frontend.http.bodies`, those of streamed answers in
`quintet.frontend.http.write_timeout`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quintet.frontend.http.error_shape import ErrorShape, bare_response
from quintet.frontend.http.half_open import HalfOpen
from quintet.frontend.http.http_request import CONNECTION
from quintet.wire.errors import ErrorCode, RequestError

IDLE_S = 75
"""How long a connection may stay open between requests, or before its first."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request line and its headers; nobody else bounds them."""
UPGRADE = b"upgrade"
SEND_BUFFER_BYTES = 64 << 10
"""Output that the system holds for one client; Linux books twice as much, and by itself would take up to 4 MiB."""


class Protocol(HttpToolsProtocol):
    """Uvicorn's protocol, which does not wait for ever: neither for headers, nor for a client to read.

    The application is lent ``abort``, for streams. What was written and is left to the socket is watched here: it must
    get smaller every ``write_timeout_s``. From its first byte on, the head of a request must be complete within
    ``header_timeout_s``, however many pieces it comes in.
    """

    def __init__(
        self, *, write_timeout_s: float, header_timeout_s: float, errors: ErrorShape, **given_by_uvicorn: Any
    ) -> None:
        """``errors``: how those are spelled that no application hears of."""
        super().__init__(**given_by_uvicorn)
        self._errors = errors
        self._write_timeout_s = write_timeout_s
        self._header_timeout_s = header_timeout_s
        self._unread_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._half_open: HalfOpen | None = None
        self._lent: dict[str, Callable[[], None]] = {}
        """What the connection and the application can have each other do, in this request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request as long as for any other."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(IDLE_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for anything."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_watching()
        self._end_head()
        if self._half_open is not None:
            self._half_open.stop()

    # --- a client that says no more ---------------------------------------------------------------------------

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Stay open for the answer to a complete request, if its client can be asked whether it is still there.

        With TLS there are no half-closed connections, and before HTTP/1.1 no interim responses.
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
        elif "break_silence" in self._lent:
            self._lent["break_silence"]()

    # --- a client that writes slowly --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse; count what belongs to a head that is still incomplete."""
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(_not_http(error, self.parser.get_method()))
            return
        if self._head_timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEADER_BYTES:
                self._refuse(
                    RequestError(
                        ErrorCode.HEAD_TOO_LARGE,
                        f"The request's headers have more than {MAX_HEADER_BYTES} bytes; send fewer or shorter ones.",
                    )
                )

    def _parse(self, data: bytes) -> None:
        """Parse; ignore offers to upgrade (RFC 9110, section 7.8). Raises `httptools.HttpParserError`.

        The parser stops behind a head that offers one, and takes what follows for another protocol. A new parser is given
        the same head without the offer, then what follows: with the request's own body and its own end.
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
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
                self.parser.feed_data(head)
            else:
                return

    def _offers_upgrade(self) -> bool:
        """Return whether the head that was just parsed offers another protocol, e.g. ``Upgrade: h2c`` from Java."""
        return bool(self.parser.should_upgrade()) and any(name == UPGRADE for name, _ in self.headers)

    def _head_without_offer(self) -> bytes:
        """Return the head that was just parsed, without its Upgrade header."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != UPGRADE]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Begin to wait for the end of the head; add the connection to the scope of the request that begins."""
        super().on_message_begin()
        self._lent = {"abort": self.transport.abort}
        self.scope["extensions"] = {CONNECTION: cast(dict[object, object], self._lent)}
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self._header_timeout_s, self._give_up_on_head)

    def on_headers_complete(self) -> None:
        """Stop waiting for the head; begin the request, unless its head is parsed once more (`_parse`)."""
        self._end_head()
        if self._offers_upgrade():
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            end_with_connection(self.cycle)

    def on_message_complete(self) -> None:
        """Hear of the end of a body, unless the parser only stops at an upgrade offer."""
        if not self._offers_upgrade():
            super().on_message_complete()

    def _give_up_on_head(self) -> None:
        self._refuse(
            RequestError(
                ErrorCode.TIMEOUT,
                f"The request's headers were not complete {self._header_timeout_s:g} s after its first byte. Send it "
                "again, at once.",
            )
        )

    def _refuse(self, error: RequestError) -> None:
        """Answer a request that did not come whole, and close; behind an answer that is not complete, only close."""
        cycle, is_body = self.cycle, self._head_timer is None
        self._end_head()
        if self.transport.is_closing():
            return
        is_first = cycle is None or cycle.response_complete
        if is_first or (is_body and not cycle.response_started and not self.pipeline):
            self.transport.write(bare_response(error, self._errors))
            self.transport.close()
        else:
            self.transport.abort()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # --- a client that reads slowly ---------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Begin to watch: more is waiting than the client takes."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """Stop watching."""
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


def end_with_connection(cycle: RequestResponseCycle) -> None:
    """Have an answer of unknown length end where the connection does: HTTP/1.0 has no chunked encoding."""
    send = cycle.send
    cycle.waiting_for_100_continue = False  # nor interim responses

    has_no_length = False

    async def send_unchunked(message: Any) -> None:
        nonlocal has_no_length
        if message["type"] == "http.response.start":
            has_no_length = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if has_no_length:
                cycle.chunked_encoding = False
        elif has_no_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]


def _not_http(error: httptools.HttpParserError, method: bytes) -> RequestError:
    """Make the error for bytes that are no request of HTTP/1."""
    if method == b"PRI":
        words = "This server speaks HTTP/1.1; the connection began with HTTP/2. Use a client that begins with HTTP/1.1."
    else:
        words = (
            f"This is no HTTP/1.1 request: {error}. Check the URL's scheme, the request line and the headers."
        )
    return RequestError(ErrorCode.INVALID, words)


def bound_send_buffer(listener: socket.socket) -> None:
    """Bound what the system holds for each client that connects to ``listener`` from now on and does not read."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
