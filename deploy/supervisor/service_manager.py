"""What systemd is told of the server, by its notification protocol (sd_notify(3)): ready, alive, stopping.

A datagram to the socket that ``NOTIFY_SOCKET`` names; where there is none, nothing is said. The supervisor proves the progress of
its processes (`Watch`), and systemd the supervisor's: a turn of its loop is what keeps the watchdog quiet.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class ServiceManager:
    """Whoever started the server and wants to hear how it is. Nothing here ever blocks or fails: it is only told."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self._address else None
        watched = environment.get("WATCHDOG_USEC", "")
        is_for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._alive_every_s = int(watched) * 1e-6 / 4 if watched.isdecimal() and is_for_us else None
        """A quarter of what systemd waits for: a busy machine may delay two of them."""
        self._said_alive_at: float | None = None
        self._unheard: tuple[str, ...] | None = None
        """That the server is ready, where it did not go out: systemd waits for it, and is told again at every turn."""

    def ready(self, url: str) -> None:
        """The server can answer."""
        self._unheard = ("READY=1", f"STATUS=Serving on {url}")
        self._repeat()

    def alive(self, now: float) -> None:
        """The supervisor's loop has turned."""
        self._repeat()
        if self._alive_every_s is None:
            return
        is_due = self._said_alive_at is None or now - self._said_alive_at >= self._alive_every_s
        if is_due and self._tell("WATCHDOG=1"):
            self._said_alive_at = now

    def stopping(self, patience_s: float) -> None:
        """The server leaves, and may take so long: systemd's own timeout for that is extended where it is shorter."""
        self._unheard = None
        self._tell(
            "STOPPING=1",
            f"EXTEND_TIMEOUT_USEC={int(patience_s * 1e6)}",
            "STATUS=Requests in flight may finish",
        )

    def _repeat(self) -> None:
        if self._unheard is not None and self._tell(*self._unheard):
            self._unheard = None

    def _tell(self, *lines: str) -> bool:
        """Return whether it went out: systemd itself may be starting again, or have too much to read."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, self._address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()
