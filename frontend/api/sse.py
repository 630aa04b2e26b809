"""Server-sent events: frames, and the keep-alive timer of idle streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CONTENT_TYPE = b"text/event-stream; charset=utf-8"
HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
KEEP_ALIVE = b": keep-alive\n"
"""Comment without a blank line: after an event with an id, OpenAI's SDKs read a blank line as an empty event."""
DONE = b"data: [DONE]\n\n"


def frame(json: bytes) -> bytes:
    """Format a JSON document as an event."""
    return b"data: " + json + b"\n\n"


class KeepAliveTimer:
    """Calls ``on_silence`` after every ``interval_s`` without a write; 0 disables it.

    One timer per stream, re-armed only when it fires: a write only stores the time.
    """

    def __init__(self, interval_s: float, on_silence: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = self._loop.time()
        if interval_s > 0:
            self._timer = self._loop.call_later(interval_s, self._fire)

    def wrote(self) -> None:
        """Note a write."""
        self._last_s = self._loop.time()

    def _fire(self) -> None:
        silent_s = self._loop.time() - self._last_s
        wait_s = self._interval_s - silent_s
        if wait_s <= 0.001:
            self._last_s = self._loop.time()
            self._on_silence()
            wait_s = self._interval_s
        self._timer = self._loop.call_later(wait_s, self._fire)

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
