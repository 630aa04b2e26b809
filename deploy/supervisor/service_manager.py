"""What systemd is told of the server, by its notification protocol (sd_notify(3)): ready, alive, stopping.

A datagram to the socket that ``NOTIFY_SOCKET`` names; where there is none, nothing is said. The supervisor proves the progress of
its processes (`Watch`), and systemd the supervisor's: a turn of its loop is what keeps the watchdog quiet.
"""

from __future__ import annotations

import contextlib
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

    def ready(self, url: str) -> None:
        """The server can answer."""
        self._tell("READY=1", f"STATUS=Serving on {url}")

    def alive(self, now: float) -> None:
        """The supervisor's loop has turned."""
        if self._alive_every_s is None:
            return
        if self._said_alive_at is None or now - self._said_alive_at >= self._alive_every_s:
            self._said_alive_at = now
            self._tell("WATCHDOG=1")

    def stopping(self, patience_s: float) -> None:
        """The server leaves, and may take so long: systemd's own timeout for that is extended where it is shorter."""
        self._tell(
            "STOPPING=1",
            f"EXTEND_TIMEOUT_USEC={int(patience_s * 1e6)}",
            "STATUS=Requests in flight may finish",
        )

    def _tell(self, *lines: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # systemd itself may be starting again
                self._socket.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, self._address)

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()
