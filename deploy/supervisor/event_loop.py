"""Wakeup sources of the loop of a supervisor or a worker host: messages, signals, child exits, the parent's exit."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from types import FrameType


class EventLoop:
    """Waits for any of these sources. Signal handlers do nothing; the loop reads the numbers from a wakeup socket.

    Must be used in the main thread, like Python's signal module.
    """

    def __init__(
        self, inbox_fd: int | None, signals: Iterable[signal.Signals], parent_fd: int | None
    ) -> None:
        self.signals: list[signal.Signals] = []
        """Signals received since the last `take_signals`, except SIGCHLD."""
        self._parent_fd = parent_fd
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for source in (inbox_fd, self._reader.fileno(), parent_fd):
            if source is not None:
                self._selector.register(source, selectors.EVENT_READ)
        self.parent_exited = False
        # keep SIGHUP ignored under nohup
        watched = [*(number for number in signals if not _is_ignored_hangup(number)), signal.SIGCHLD]
        self._old_handlers = {number: signal.signal(number, _do_nothing) for number in watched}
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> None:
        """Wait for an event, at most ``timeout_s``."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._parent_fd:
                self._read_parent(key.fd)
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return
        self.signals += [signal.Signals(number) for number in numbers if number != signal.SIGCHLD]

    def take_signals(self) -> list[signal.Signals]:
        """Return the signals received since the last call, except SIGCHLD."""
        taken, self.signals = self.signals, []
        return taken

    def discard_signals(self, seconds: float) -> None:
        """Wait ``seconds`` and discard the signals received meanwhile."""
        time.sleep(seconds)
        self.wait(0)
        self.signals.clear()

    def _read_parent(self, parent_fd: int) -> None:
        if os.read(parent_fd, 4096) == b"":
            self.parent_exited = True
            self._selector.unregister(parent_fd)

    def close(self) -> None:
        """Restore the signal handlers and close the descriptors."""
        signal.set_wakeup_fd(self._old_wakeup_fd)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._selector.close()
        self._reader.close()
        self._writer.close()


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing; Python has written it to the wakeup descriptor."""
