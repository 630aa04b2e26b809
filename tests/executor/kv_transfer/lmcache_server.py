"""A stub of LMCache's server: `lmcache.v1.server` of version 0.5.6, in memory.

`tests/clients` tests the connector against the real server.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

PUT, GET, EXIST = 1, 2, 3
ORDER, ANSWER = struct.Struct("<9i150s"), struct.Struct("<9i")


class StubServer:
    """One server. An invalid request fails an assertion or closes the connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1", self._listener.getsockname()[1]
        self.url = f"lm://127.0.0.1:{self.address[1]}"
        self.objects: dict[tuple[str, int], bytes | None] = {}
        """By model and hash. None: the content of this object was truncated."""
        self.codes = (200, 400)
        """Status codes of an existing and of a missing object."""
        self.torn_bytes = 1000
        """Size that the server reports for a truncated object."""
        self.closes_after_bytes: int | None = None
        """Number of content bytes that the server sends before it closes the connection."""
        self.pause_s = 0.0
        """Delay before each reply."""
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def close_connections(self) -> None:
        """Close all connections, as a restart does."""
        for connection in [*self._open]:
            with contextlib.suppress(OSError):  # the client has closed it
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop the server and close all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.close_connections()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as received:
            while len(order := received.read(ORDER.size)) == ORDER.size:
                command, num_bytes, form, dtype, place, *_, name = ORDER.unpack(order)
                model, num_workers, worker, number, words = name.decode().strip().split("@")
                assert (int(num_workers), int(worker), words) == (1, 0, "uint8")
                assert (form, dtype, place) == (4, 6, 0)
                key = (model, int(number, 16))
                if command == PUT:
                    content = received.read(num_bytes)
                    self.objects[key] = content if len(content) == num_bytes else None
                    continue
                found = self.objects.get(key, b"")
                code = self.codes[0 if key in self.objects else 1]
                assert command in (GET, EXIST)
                sent = 0 if command == EXIST else self.torn_bytes if found is None else len(found)
                time.sleep(self.pause_s)
                connection.sendall(ANSWER.pack(code, sent, form, dtype, sent, 0, 0, 0, place))
                if command == GET and found is None:
                    break  # the real server fails
                if command == GET:
                    connection.sendall((found or b"")[: self.closes_after_bytes])
                    if self.closes_after_bytes is not None:
                        break
        self._open.discard(connection)


@contextlib.contextmanager
def stub_server() -> Iterator[StubServer]:
    """Run a stub server."""
    server = StubServer()
    try:
        yield server
    finally:
        server.close()
