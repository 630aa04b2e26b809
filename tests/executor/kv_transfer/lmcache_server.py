"""A stand-in of LMCache's server: what `lmcache.v1.server` of its version 0.5.6 does with what it is sent, in memory.

`tests/clients` has the connector against the real one.
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


class StandIn:
    """One server; who errs is told by an assertion, or hears nothing more."""

    def __init__(self) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1", self._door.getsockname()[1]
        self.url = f"lm://127.0.0.1:{self.address[1]}"
        self.objects: dict[tuple[str, int], bytes | None] = {}
        """By model and hash. None: of one of which the content did not come whole."""
        self.codes = (200, 400)
        """Of what is there, and of what is not."""
        self.torn_bytes = 1000
        """How many bytes it says to have of a content that did not come whole."""
        self.dies_behind: int | None = None
        """So many bytes of a content it sends, and is gone."""
        self.pause_s = 0.0
        """Before each answer."""
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._door.accept()
                self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def hang_up(self) -> None:
        """End all connections, as one that is started anew does."""
        for connection in [*self._open]:
            with contextlib.suppress(OSError):  # its client has hung up
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and all connections."""
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.hang_up()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as came:
            while len(order := came.read(ORDER.size)) == ORDER.size:
                command, num_bytes, form, dtype, place, *_, called = ORDER.unpack(order)
                model, num_workers, worker, number, words = called.decode().strip().split("@")
                assert (int(num_workers), int(worker), words) == (1, 0, "uint8")
                assert (form, dtype, place) == (4, 6, 0)
                key = (model, int(number, 16))
                if command == PUT:
                    content = came.read(num_bytes)
                    self.objects[key] = content if len(content) == num_bytes else None
                    continue
                found = self.objects.get(key, b"")
                code = self.codes[0 if key in self.objects else 1]
                assert command in (GET, EXIST)
                sent = 0 if command == EXIST else self.torn_bytes if found is None else len(found)
                time.sleep(self.pause_s)
                connection.sendall(ANSWER.pack(code, sent, form, dtype, sent, 0, 0, 0, place))
                if command == GET and found is None:
                    break  # the real one errs here
                if command == GET:
                    connection.sendall((found or b"")[: self.dies_behind])
                    if self.dies_behind is not None:
                        break
        self._open.discard(connection)


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """Run one."""
    server = StandIn()
    try:
        yield server
    finally:
        server.close()
