"""A client that has closed its sending half: it waits for its answer, or has left altogether.

Both look alike until something is written to them: only then the system of one that is gone says so (RFC 9293, 3.5.2).
Knows sockets; knows nothing of what is written.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 15.0


class HalfOpen:
    """Watches one connection behind its client's last byte, until `stop`; ends it when nobody is there."""

    def __init__(self, transport: asyncio.Transport, probe: Callable[[], None]) -> None:
        """``probe`` writes something that clients pass over; called at once, and again after growing pauses."""
        self._transport = transport
        self._probe = probe
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), 0)  # errors are told unasked
        self._pause_s = FIRST_PAUSE_S
        self._ask()

    def stop(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _ask(self) -> None:
        self._probe()
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _look(self) -> None:
        if self._poll.poll(0):
            self._transport.abort()
        else:
            self._ask()
