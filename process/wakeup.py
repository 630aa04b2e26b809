"""Wakeup of a process's loop from another thread, delivered like a frame."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec


class Wakeup:
    """Triggered by any thread, any number of times; the loop's `quintet.process.sockets.Inbox` merges them into one message.

    So the cause of an iteration is in its messages, and in the recording.
    """

    def __init__(self, message: Callable[[int], msgspec.Struct]) -> None:
        """``message`` maps the number of triggers to the loop's message."""
        self._message = message
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def notify(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def answer(self) -> msgspec.Struct | None:
        """Return the message for the triggers since the last call; None without any."""
        try:
            return self._message(os.eventfd_read(self._descriptor))
        except BlockingIOError:
            return None

    def fileno(self) -> int:
        """Return the descriptor that is readable while triggers are pending."""
        return self._descriptor

    def close(self) -> None:
        """Close the descriptor. `notify` must not be called afterwards."""
        os.close(self._descriptor)
