"""A bell that another thread of a process rings, and that wakes the process's loop as a frame does."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec


class Wakeup:
    """Rung by any thread, any number of times; the loop's `quintet.process.sockets.Inbox` turns the rings into one message.

    So what woke the loop is part of its turn like everything else, and in its recording.
    """

    def __init__(self, message: Callable[[int], msgspec.Struct]) -> None:
        """``message`` makes what the loop is told of so many rings."""
        self._message = message
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        """Wake the loop."""
        os.eventfd_write(self._descriptor, 1)

    def answer(self) -> msgspec.Struct | None:
        """Return the message of the rings since the last answer; None when there were none."""
        try:
            return self._message(os.eventfd_read(self._descriptor))
        except BlockingIOError:
            return None

    def fileno(self) -> int:
        """Return the descriptor that is readable while there are rings without an answer."""
        return self._descriptor

    def close(self) -> None:
        """Give the descriptor back. Nobody may ring any more."""
        os.close(self._descriptor)
