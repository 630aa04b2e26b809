"""A way to a port of another process, of which a test decides how much comes through, and that it is cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

PIECE_BYTES = 1 << 12


class Narrows:
    """A port here that passes on to one of 127.0.0.1. Of what comes back it lets so many bytes through, then no more."""

    def __init__(self, to_port: int, num_bytes: int) -> None:
        self._to_port = to_port
        self._left: int | None = num_bytes
        """Bytes that may still come; None: all of them."""
        self._changed = threading.Condition()
        """Guards all that changes."""
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.is_full = threading.Event()
        """Set once more has come than may pass: it is on its way, and waits here."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Narrows:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for each in self._open:
            each.close()

    def widen(self) -> None:
        """Let everything through, what waits too."""
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def cut(self) -> None:
        """Break all connections; what waits is lost. Later ones are not narrow."""
        with self._changed:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self.widen()

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                with self._changed:
                    self._open += (near, far)
                try:
                    far.connect(("127.0.0.1", self._to_port))
                except OSError:
                    near.shutdown(socket.SHUT_RDWR)
                    continue
                self._start(self._pass_on, near, far, False)
                self._start(self._pass_on, far, near, True)

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_narrow: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if is_narrow:
                    self._take(len(piece))
                sink.sendall(piece)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _take(self, num_bytes: int) -> None:
        """Wait until so much may pass."""
        with self._changed:
            while self._left is not None and num_bytes > self._left:
                self.is_full.set()
                self._changed.wait()
            if self._left is not None:
                self._left -= num_bytes
