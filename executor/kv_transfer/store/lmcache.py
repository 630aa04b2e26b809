"""A store in the memory of an LMCache server, started by `lmcache_server`: ``lm://host:port``.

This module implements its protocol, so LMCache's packages are not needed. Each request has a connection of its own:

    ──▶ request, and the content after a PUT                          nine 32-bit numbers, and a key of 150 characters
    ◀── reply, and the content of a found object after a GET's reply  nine 32-bit numbers

PUT has no reply; the EXIST request after it confirms it. Objects cannot be removed, so damaged ones are overwritten.
A key has the five parts that the server parses: model, number of workers, worker, hash and dtype.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from quintet.executor.kv_transfer.store.connector import MAX_DAMAGED, ObjectStore
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

ORDER = struct.Struct("<9i150s")
"""Command, bytes of the content, format, dtype, location, four numbers of its shape; key padded with spaces."""
ANSWER = struct.Struct("<9i")
"""Code, bytes of the content; format, dtype, four numbers of its shape and location are those of the PUT."""
PUT, GET, EXIST = 1, 2, 3
FOUND, MISSING = 200, 400
BYTES, UINT8 = 4, 6
"""Format and dtype of plain bytes."""
LOOKUP_BATCH = 128
"""EXIST requests per batch: their replies fit the socket buffers while unread."""
CONNECT_S = 5.0
TIMEOUT_S = 60.0
"""Timeout of a request, or of a batch of EXIST requests, to the last byte of the reply."""


class ConnectionClosed(ConnectionError):
    """The server closed the connection before the first byte of a reply or content."""


def open_lmcache(config: KvStoreConfig) -> LmStore:
    """See `quintet.executor.kv_transfer.store.connector.open_connector`."""
    url = urlsplit(config.url)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or url.path.strip("/") or url.query or url.fragment:
        raise ConfigError(f"--kv-store {config.url}: use lm://host:port of an lmcache_server, without a path")
    return LmStore(host, port)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request on a connection, with a deadline. Raises `OSError`, also on timeout."""

    connection: socket.socket
    until_s: float

    def send(self, content: bytes | memoryview) -> None:
        self._set_timeout()
        self.connection.sendall(content)

    def receive(self, into: memoryview) -> None:
        """Fill ``into``."""
        done = 0
        while done < len(into):
            self._set_timeout()
            count = self.connection.recv_into(into[done:])
            if not count:
                raise (ConnectionError if done else ConnectionClosed)(
                    "LMCache's server closed the connection"
                )
            done += count

    def receive_reply(self) -> tuple[int, int]:
        """Return a reply's code, and the number of bytes that follow."""
        answer = bytearray(ANSWER.size)
        self.receive(memoryview(answer))
        code, num_bytes, *_ = ANSWER.unpack(answer)
        if code not in (FOUND, MISSING):
            raise ConnectionError(f"LMCache's server replied with unknown code {code}")
        return code, num_bytes

    def _set_timeout(self) -> None:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("LMCache's server did not finish in time")
        self.connection.settimeout(left_s)


class LmStore(ObjectStore):
    """Objects of an LMCache server. Its methods raise `OSError`."""

    def __init__(self, host: str, port: int, timeout_s: float = TIMEOUT_S) -> None:
        self._address = host, port
        self._timeout_s = timeout_s
        self._damaged: set[str] = set()
        """Damaged objects, treated as missing until overwritten."""

    def count(self, names: Sequence[str]) -> int:
        for first in range(0, len(names), LOOKUP_BATCH):
            batch = names[first : first + LOOKUP_BATCH]
            with self._exchange() as exchange:
                exchange.send(b"".join(_order(EXIST, name) for name in batch))
                found = [exchange.receive_reply()[0] == FOUND for _ in batch]
            for index, (name, is_there) in enumerate(zip(batch, found, strict=True), first):
                if not is_there or name in self._damaged:
                    return index
        return len(names)

    def put(self, name: str, content: memoryview) -> bool:
        if self.count([name]):
            return True
        with self._exchange() as exchange:
            exchange.send(_order(PUT, name, len(content)))
            exchange.send(content)
            exchange.send(_order(EXIST, name))
            is_there = exchange.receive_reply()[0] == FOUND
        if is_there:
            self._damaged.discard(name)
        return is_there

    def get(self, name: str, into: memoryview) -> bool:
        if name in self._damaged:
            return False
        with self._exchange() as exchange:
            exchange.send(_order(GET, name))
            code, num_bytes = exchange.receive_reply()
            if code == MISSING:
                return False
            with contextlib.suppress(ConnectionClosed):
                if num_bytes == len(into):
                    exchange.receive(into)
                    return True
            # The size differs, or a killed writer left an incomplete object, for which the server closes the
            # connection.
            self.drop(name)
            return False

    def drop(self, name: str) -> None:
        if len(self._damaged) >= MAX_DAMAGED:
            self._damaged.pop()
        self._damaged.add(name)

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[_Exchange]:
        with socket.create_connection(self._address, CONNECT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield _Exchange(connection, time.monotonic() + self._timeout_s)


def _order(command: int, name: str, num_bytes: int = 0) -> bytes:
    identity, _, key = name.partition("/")
    # The server parses the key as a number; the 1 before it keeps leading zeros.
    object_key = f"quintet-{identity}@1@0@1{key}@uint8"
    assert len(object_key) <= 150, f"the key {object_key} has more than 150 characters"
    return ORDER.pack(command, num_bytes, BYTES, UINT8, 0, num_bytes, 0, 0, 0, object_key.encode().ljust(150))
