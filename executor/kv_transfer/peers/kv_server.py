"""Server for peers' block requests, and the blocks that it offers: copies in host memory by key, with LRU eviction."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import zmq

from quintet.executor.kv_transfer.block_bytes import Bytes, Int, WholeBlocks
from quintet.executor.kv_transfer.kv_identity import digest_of
from quintet.executor.kv_transfer.peers.keys import Context, PeerAuthenticator
from quintet.executor.kv_transfer.peers.messages import (
    MAX_HEAD_BYTES,
    VERSION,
    Ask,
    BlockReply,
    BlocksMissing,
    IdentityMismatch,
    OwnIdentity,
    max_requests,
)
from quintet.executor.memory import lazy_zeros
from quintet.process.log import LogLimit
from quintet.wire.codec import UNREADABLE, encode
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)

POLL_MS = 200
"""Interval between attempts to open an occupied listen address."""
_decoder = msgspec.msgpack.Decoder(Ask)


class OfferedBlocks:
    """Used by the executor's loop, which copies blocks in, and by the serving thread."""

    def __init__(self, blocks: WholeBlocks, num_rows: int) -> None:
        self._blocks, self.block_bytes = blocks, blocks.block_bytes
        shape = (num_rows, blocks.block_bytes)
        self._memory: Bytes = lazy_zeros(shape, torch.uint8, torch.device("cpu")).numpy()
        self._lock = threading.Lock()
        """Guards the fields below and the memory."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[bytes, int] = {}
        """Rows by key, least recently used first."""

    def put(self, keys: Sequence[bytes], blocks: Int) -> None:
        """Copy blocks of KV memory that are not offered yet; if they exceed the capacity, the first ones."""
        with self._lock:
            new, rows = list[int](), list[int]()
            # The first blocks become the most recently used.
            for index in reversed(range(min(len(keys), len(self._memory)))):
                key = keys[index]
                row = self._row_of.pop(key, None)
                if row is None:
                    row = self._take_row()
                    new.append(index)
                    rows.append(row)
                self._row_of[key] = row
            if new:
                wait = self._blocks.take_into(blocks[new], self._memory, np.array(rows, np.int32))
                wait()  # so the serving thread reads complete blocks

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        return self._row_of.pop(next(iter(self._row_of)))

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            row = self._row_of.pop(key, None)
            if row is None:
                return None
            self._row_of[key] = row
            return bytes(self._memory[row].data)


class KvServer:
    """The listening socket and its request handler, which answers one request at a time."""

    def __init__(self, context: Context, address: str, own: OwnIdentity, offered: OfferedBlocks) -> None:
        """address: ``host:port``.

        Raises `ConfigError` for an address of another machine. An occupied address is retried with `open`.
        """
        self.address = address
        self.is_open = False
        self._own, self._offered = own, offered
        self._invalid_requests = LogLimit()
        self._authenticator = PeerAuthenticator(context, own.key)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # A peer that does not read loses replies. Twice the window: ZeroMQ updates its read count late, in halves.
        self.socket.setsockopt(zmq.SNDHWM, 2 * max_requests(offered.block_bytes))
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # detects vanished machines
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEAD_BYTES)
        if address.startswith("["):
            self.socket.setsockopt(zmq.IPV6, 1)
        own.key.protect(self.socket, listens=True)
        try:
            self.open()
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        self._authenticator.socket.close(linger=0)
        self.socket.close(linger=0)

    def serve(self, stop_fd: int) -> None:
        """Answer peers until the descriptor is readable; try to open an occupied address meanwhile."""
        if not self.is_open:
            log.warning(
                "%s is in use: KV will be offered there once it is free; until then peers compute",
                self.address,
            )
        poller = zmq.Poller()
        for source in (stop_fd, self._authenticator.socket, self.socket):
            poller.register(source, zmq.POLLIN)
        while stop_fd not in (ready := dict(poller.poll(None if self.is_open else POLL_MS))):
            if not self.is_open:
                self.open()
            if self._authenticator.socket in ready:
                self._authenticator.answer()
            if self.socket in ready:
                self.answer()

    def open(self) -> None:
        """Listen, unless the address is in use by another process."""
        try:
            self.socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise ConfigError(
                    f"--kv-peer-listen {self.address}: {error.strerror}; use an address of this machine"
                ) from None
        else:
            self.is_open = True

    def answer(self) -> None:
        """Answer one waiting request. Ignores an invalid one."""
        routing_id, *frames = self.socket.recv_multipart()
        try:
            ask = _decoder.decode(frames[0]) if len(frames) == 1 else None
        except UNREADABLE:
            ask = None
        if ask is None or not ask.is_valid:
            if self._invalid_requests.count():
                log.warning("ignored an invalid request for KV blocks from an unknown client")
            return
        if ask.identity != self._own.identity or ask.version != VERSION:
            self.socket.send_multipart(
                (routing_id, encode(IdentityMismatch(ask.number, dict(self._own.parts))))
            )
            return
        (key,) = ask.keys
        block = self._offered.get(key)
        if block is None:
            self.socket.send_multipart((routing_id, encode(BlocksMissing(ask.number, [0]))))
            return
        head = encode(BlockReply(ask.number, 0, digest_of(self._own.identity, key, memoryview(block))))
        self.socket.send_multipart((routing_id, head, block), copy=False)
