"""Notifications to systemd (sd_notify(3)): ready, watchdog, stopping.

Datagrams to the socket named by ``NOTIFY_SOCKET``; without it, none are sent. `Watch` monitors the processes, and
systemd's watchdog monitors the supervisor's loop.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class ServiceManager:
    """Sends notifications to the service manager. Never blocks and never fails."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self._address else None
        watched = environment.get("WATCHDOG_USEC", "")
        is_for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._alive_every_s = int(watched) * 1e-6 / 4 if watched.isdecimal() and is_for_us else None
        """A quarter of systemd's watchdog timeout: a busy machine may delay two notifications."""
        self._watchdog_sent_at: float | None = None
        self._unsent: tuple[str, ...] | None = None
        """Ready notification that could not be sent; retried in every iteration of the loop."""

    def ready(self, url: str) -> None:
        """Notify that the server accepts requests."""
        self._unsent = ("READY=1", f"STATUS=Serving on {url}")
        self._repeat()

    def alive(self, now: float) -> None:
        """Reset systemd's watchdog. Call in every iteration of the supervisor's loop."""
        self._repeat()
        if self._alive_every_s is None:
            return
        is_due = self._watchdog_sent_at is None or now - self._watchdog_sent_at >= self._alive_every_s
        if is_due and self._send_lines("WATCHDOG=1"):
            self._watchdog_sent_at = now

    def stopping(self, timeout_s: float) -> None:
        """Notify that the server stops, and extend systemd's stop timeout to at least ``timeout_s``."""
        self._unsent = None
        self._send_lines(
            "STOPPING=1",
            f"EXTEND_TIMEOUT_USEC={int(timeout_s * 1e6)}",
            "STATUS=Requests in flight may finish",
        )

    def _repeat(self) -> None:
        if self._unsent is not None and self._send_lines(*self._unsent):
            self._unsent = None

    def _send_lines(self, *lines: str) -> bool:
        """Return whether the datagram was sent. It fails while systemd restarts or its buffer is full."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto("\n".join(lines).encode(), socket.MSG_DONTWAIT, self._address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
