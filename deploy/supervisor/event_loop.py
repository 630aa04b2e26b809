"""What wakes the supervisor's loop: a message, a signal, a child's end, the parent's end."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from types import FrameType


class EventLoop:
    """Waits for any of the above. Signal handlers do nothing: the numbers are read from a pipe, by the loop.

    Belongs to the main thread, as Python's signals do.
    """

    def __init__(self, inbox_fd: int, signals: Iterable[signal.Signals], parent_fd: int | None) -> None:
        self._signals: list[signal.Signals] = []
        self._parent_fd = parent_fd
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox_fd, selectors.EVENT_READ)
        self._selector.register(self._reader, selectors.EVENT_READ)
        if parent_fd is not None:
            self._selector.register(parent_fd, selectors.EVENT_READ)
        self.parent_is_gone = False
        # a SIGHUP that nohup had ignored stays ignored
        watched = [*(number for number in signals if not _is_ignored_hangup(number)), signal.SIGCHLD]
        self._old_handlers = {number: signal.signal(number, _do_nothing) for number in watched}
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> None:
        """Return when something happened, or after ``timeout_s``."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._parent_fd:
                self._listen_to_parent(key.fd)
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return
        self._signals += [signal.Signals(number) for number in numbers if number != signal.SIGCHLD]

    def take_signals(self) -> list[signal.Signals]:
        """Return the signals that came since the last call, children's ends left out."""
        taken, self._signals = self._signals, []
        return taken

    def swallow_echoes(self, seconds: float) -> None:
        """Forget the signals that come within the next moment."""
        time.sleep(seconds)
        self.wait(0)
        self._signals.clear()

    def _listen_to_parent(self, parent_fd: int) -> None:
        if os.read(parent_fd, 4096) == b"":
            self.parent_is_gone = True
            self._selector.unregister(parent_fd)

    def close(self) -> None:
        """Give the signals back."""
        signal.set_wakeup_fd(self._old_wakeup_fd)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._selector.close()
        self._reader.close()
        self._writer.close()


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Be a handler, so that the signal is written to the wakeup descriptor."""
