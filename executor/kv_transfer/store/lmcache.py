"""A store in the memory of LMCache's server, which `lmcache_server` runs: ``lm://host:port``.

Its protocol is spoken here, so none of LMCache's packages is needed. Of one connection at a time:

    ──▶ order, and behind a PUT its content     nine numbers of 32 bits, and a key of 150 characters
    ◀── answer, and behind one to GET, where there is such an object, its content     nine numbers

PUT is not answered: it is over when the question behind it is, whether such an object is there. There is no order to remove one,
so what is damaged is written over. A key has the five parts that the server wants to read: model, number of workers, worker, hash
and dtype.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from quintet.executor.kv_transfer.store.connector import MAX_DAMAGED
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

ORDER = struct.Struct("<9i150s")
"""Command, bytes of the content, format, dtype, place, four numbers of its shape; key, with blanks behind it."""
ANSWER = struct.Struct("<9i")
"""Code, bytes of the content; format, dtype, four numbers of its shape and place are as they were put."""
PUT, GET, EXIST = 1, 2, 3
FOUND, LACKING = 200, 400
BYTES, UINT8 = 4, 6
"""Format and dtype of what is no tensor."""
QUESTIONS = 128
"""Asked in one breath: their answers fit what any connection holds while nobody reads it."""
CONNECT_S = 5.0
MOST_S = 60.0
"""Of one order, or as many questions as are asked in one breath, to the last byte of what is answered."""


class NothingCame(ConnectionError):
    """The server hung up before the first byte of what it was to send."""


def open_lmcache(config: KvStoreConfig) -> LmStore:
    """See `quintet.executor.kv_transfer.store.connector.open_connector`."""
    url = urlsplit(config.url)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or url.path.strip("/") or url.query or url.fragment:
        raise ConfigError(
            f"--kv-store {config.url}: write lm://host:port, where lmcache_server listens; it has nothing below that"
        )
    return LmStore(host, port)


@dataclass(frozen=True, slots=True)
class _Talk:
    """One order on a connection, and what is answered. Raises `OSError`, for one, when its time is over."""

    connection: socket.socket
    until_s: float

    def say(self, content: bytes | memoryview) -> None:
        """Send all of it."""
        self._wait_no_longer()
        self.connection.sendall(content)

    def hear(self, into: memoryview) -> None:
        """Fill ``into``."""
        done = 0
        while done < len(into):
            self._wait_no_longer()
            count = self.connection.recv_into(into[done:])
            if not count:
                raise (ConnectionError if done else NothingCame)("LMCache's server hung up")
            done += count

    def hear_answer(self) -> tuple[int, int]:
        """Return an answer's code, and how many bytes follow."""
        answer = bytearray(ANSWER.size)
        self.hear(memoryview(answer))
        code, num_bytes, *_ = ANSWER.unpack(answer)
        if code not in (FOUND, LACKING):
            raise ConnectionError(f"LMCache's server answers with the code {code}")
        return code, num_bytes

    def _wait_no_longer(self) -> None:
        """Have the next call wait as long as is left, in all."""
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("LMCache's server does not come to an end")
        self.connection.settimeout(left_s)


class LmStore:
    """See `quintet.executor.kv_transfer.store.connector.KvConnector`. Raises `OSError`."""

    def __init__(self, host: str, port: int, most_s: float = MOST_S) -> None:
        self._address = host, port
        self._most_s = most_s
        self._idle: list[socket.socket] = []
        """Connections on which nothing is on its way."""
        self._damaged: set[str] = set()
        """Objects that are taken not to be there, until they are written over."""

    def count(self, names: Sequence[str]) -> int:
        """See `KvConnector.count`."""
        for first in range(0, len(names), QUESTIONS):
            asked = names[first : first + QUESTIONS]
            with self._talk() as talk:
                talk.say(b"".join(_order(EXIST, name) for name in asked))
                there = [talk.hear_answer()[0] == FOUND for _ in asked]
            for index, (name, is_there) in enumerate(zip(asked, there, strict=True), first):
                if not is_there or name in self._damaged:
                    return index
        return len(names)

    def put(self, name: str, content: memoryview) -> bool:
        """See `KvConnector.put`."""
        if self.count([name]):
            return True
        with self._talk() as talk:
            talk.say(_order(PUT, name, len(content)))
            talk.say(content)
            talk.say(_order(EXIST, name))
            is_there = talk.hear_answer()[0] == FOUND
        if is_there:
            self._damaged.discard(name)
        return is_there

    def get(self, name: str, into: memoryview) -> bool:
        """See `KvConnector.get`."""
        if name in self._damaged:
            return False
        with self._talk() as talk:
            talk.say(_order(GET, name))
            code, num_bytes = talk.hear_answer()
            if code == LACKING:
                return False
            with contextlib.suppress(NothingCame):
                if num_bytes == len(into):
                    talk.hear(into)
                    return True
            # Of another size; or it lacks what its writer was killed before it had sent, and then the server hangs up.
            talk.connection.close()
            self.drop(name)
            return False

    def drop(self, name: str) -> None:
        """See `KvConnector.drop`."""
        if len(self._damaged) >= MAX_DAMAGED:
            self._damaged.pop()
        self._damaged.add(name)

    def close(self) -> None:
        """See `KvConnector.close`."""
        while (connection := self._take_idle()) is not None:
            connection.close()

    def _take_idle(self) -> socket.socket | None:
        try:
            return self._idle.pop()  # one step, whoever else is at it
        except IndexError:
            return None

    @contextlib.contextmanager
    def _talk(self) -> Iterator[_Talk]:
        """Have a connection to oneself. After an error, those that are idle end too: their server may be another by now."""
        connection = self._take_idle()
        if connection is None:
            connection = socket.create_connection(self._address, CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            yield _Talk(connection, time.monotonic() + self._most_s)
        except BaseException:
            connection.close()
            self.close()
            raise
        if connection.fileno() >= 0:
            self._idle.append(connection)


def _order(command: int, name: str, num_bytes: int = 0) -> bytes:
    whose, _, key = name.partition("/")
    # The key is read as a number; the 1 before it keeps the zeros that it begins with.
    called = f"quintet-{whose}@1@0@1{key}@uint8"
    assert len(called) <= 150, f"{called} is longer than a key may be"
    return ORDER.pack(command, num_bytes, BYTES, UINT8, 0, num_bytes, 0, 0, 0, called.encode().ljust(150))
