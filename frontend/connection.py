"""One connection of a client that may be slow: how long it is waited for, and how much is held for it.

Uvicorn speaks the protocol; here is its patience. Bodies have theirs in `quintet.frontend.bodies`, streamed answers in
`quintet.frontend.patience`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quintet.frontend.error_shape import ErrorShape, bare_response
from quintet.frontend.exchange import CONNECTION
from quintet.frontend.half_open import HalfOpen
from quintet.wire.errors import ErrorCode, RequestError

IDLE_S = 75
"""How long a connection may stay open between requests, or before its first."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes of a request line and its headers; nobody else bounds them."""
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
        super().data_received(data)
        if self._head_timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEADER_BYTES:
                self._refuse(
                    RequestError(
                        ErrorCode.HEAD_TOO_LARGE,
                        f"The request's headers have more than {MAX_HEADER_BYTES} bytes; send fewer or shorter ones.",
                    )
                )

    def on_message_begin(self) -> None:
        """Begin to wait for the end of the head; add the connection to the scope of the request that begins."""
        super().on_message_begin()
        self._lent = {"abort": self.transport.abort}
        self.scope["extensions"] = {CONNECTION: cast(dict[object, object], self._lent)}
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self._header_timeout_s, self._give_up_on_head)

    def on_headers_complete(self) -> None:
        """Stop waiting for the head."""
        self._end_head()
        super().on_headers_complete()

    def _give_up_on_head(self) -> None:
        self._refuse(
            RequestError(
                ErrorCode.TIMEOUT,
                f"The request's headers were not complete {self._header_timeout_s:g} s after its first byte. Send it "
                "again, at once.",
            )
        )

    def _refuse(self, error: RequestError) -> None:
        """Answer a request whose head never came, and close; behind an answer that is not complete, only close."""
        self._end_head()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
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


def bound_send_buffer(listener: socket.socket) -> None:
    """Bound what the system holds for each client that connects to ``listener`` from now on and does not read."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
