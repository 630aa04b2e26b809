"""TCP proxy that tests throttle and cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

PIECE_BYTES = 1 << 12


class ThrottledProxy:
    """Proxy to a port of 127.0.0.1 that blocks after `num_bytes` of responses."""

    def __init__(self, to_port: int, num_bytes: int) -> None:
        self._to_port = to_port
        self._left: int | None = num_bytes
        """Remaining bytes of responses; None: unlimited."""
        self._changed = threading.Condition()
        """Guards `_left` and `_open`."""
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.is_full = threading.Event()
        """Set once bytes beyond the limit are waiting."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> ThrottledProxy:
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

    def unthrottle(self) -> None:
        """Remove the limit, also for waiting bytes."""
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def cut(self) -> None:
        """Close all connections and drop waiting bytes. Later connections are unlimited."""
        with self._changed:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self.unthrottle()

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
                self._start(self._forward, near, far, False)
                self._start(self._forward, far, near, True)

    def _forward(self, source: socket.socket, sink: socket.socket, is_throttled: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if is_throttled:
                    self._acquire(len(piece))
                sink.sendall(piece)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _acquire(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may pass."""
        with self._changed:
            while self._left is not None and num_bytes > self._left:
                self.is_full.set()
                self._changed.wait()
            if self._left is not None:
                self._left -= num_bytes
