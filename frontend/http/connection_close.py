"""Closes of connections: half-closed by the client, and as the end of a response of HTTP/1.0.

A client that closed its sending half may wait for the response or be gone. Both look alike until the server writes:
then the peer answers with a reset if it is gone (RFC 9293, 3.5.2).
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 15.0


class HalfOpen:
    """Probes one connection after its client's last byte, until `stop`; aborts it if the client is gone."""

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], None]) -> None:
        """``probe`` writes bytes that clients ignore. Called at once, and again with exponential backoff."""
        self._transport = transport
        self._probe = probe
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), 0)  # poll always reports errors
        self._backoff_s = MIN_BACKOFF_S
        self._probe_client()

    def stop(self) -> None:
        self._timer.cancel()

    def _probe_client(self) -> None:
        self._probe()
        self._timer = asyncio.get_running_loop().call_later(self._backoff_s, self._check)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _check(self) -> None:
        if self._poll.poll(0):
            self._transport.abort()
        else:
            self._probe_client()


def close_delimited(cycle: RequestResponseCycle) -> None:
    """End a response of unknown length by closing the connection: HTTP/1.0 has no chunked encoding."""
    send = cycle.send
    cycle.waiting_for_100_continue = False  # HTTP/1.0 has no interim responses either

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
