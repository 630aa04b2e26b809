"""Client connection to one peer server: queued, requested and received blocks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quintet.executor.kv_transfer.block_bytes import Bytes
from quintet.executor.kv_transfer.kv_identity import digest_of
from quintet.executor.kv_transfer.peers.keys import Context, PeerKey
from quintet.executor.kv_transfer.peers.messages import (
    MAX_HEAD_BYTES,
    MAX_REQUESTS,
    VERSION,
    Answer,
    Ask,
    BlockReply,
    BlocksMissing,
    IdentityMismatch,
    max_unread_replies,
    window_of,
)
from quintet.wire.codec import UNREADABLE, encode

log = logging.getLogger(__name__)

MAX_FRAMES = 64
"""Maximum frames per call, for fairness between links."""
REPLY_TIMEOUT_S = 5.0
"""Timeout in seconds without any reply to outstanding requests."""
REQUEST_TIMEOUT_S = 20.0
"""Timeout in seconds of a single request."""
MISMATCH_BACKOFF_S = 60.0
"""Time in seconds without requests to a peer with another identity or with wrong data."""
_LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class PeerLost(Exception):
    """The connection to this peer failed; the message gives the cause.

    The peer is not used for some time, and its blocks are computed locally.
    """

    def __init__(self, reason: str, backoff_s: float = 2.0) -> None:
        super().__init__(reason)
        self.backoff_s = backoff_s


@dataclass(slots=True, frozen=True)
class WantedBlock:
    """A block to fetch."""

    tables: int
    host_block: int
    key: bytes


@dataclass(slots=True, frozen=True)
class BlockArrival:
    """The result of a fetch."""

    wanted: WantedBlock
    is_there: bool


class Link:
    """Used by one thread. Sending and receiving methods may raise `PeerLost`; `left` then returns the missing blocks."""

    def __init__(
        self,
        context: Context,
        peer: str,
        key: PeerKey | None,
        identity: bytes,
        parts: Mapping[str, str],
        staging: Bytes,
        first_host_block: int,
    ) -> None:
        """staging: host blocks for contents, ``[blocks, bytes]``, numbered from ``first_host_block``.

        Raises `zmq.ZMQError` if ``peer`` is not a valid address.
        """
        self.peer = peer
        self._identity, self._parts = identity, parts
        self._staging, self._first = staging, first_host_block
        self._window = window_of(staging.shape[1])
        self._waiting: deque[WantedBlock] = deque()
        self._outstanding: dict[int, dict[int, WantedBlock]] = {}
        """Outstanding blocks by request number and index."""
        self._until_s: dict[int, float] = {}
        """Deadline by request number."""
        self._last_number = 0
        self._last_reply_s = 0.0
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, max_unread_replies(staging.shape[1]))
        self.socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_HEAD_BYTES, staging.shape[1]))
        if peer.startswith("["):
            self.socket.setsockopt(zmq.IPV6, 1)
        if key is not None:
            key.protect(self.socket, listens=False)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_LOST_EVENTS)
        try:
            self.socket.connect(f"tcp://{peer}")
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def is_idle(self) -> bool:
        """True if no block is outstanding."""
        return not (self._waiting or self._outstanding)

    def request(self, wanted: Iterable[WantedBlock], now_s: float) -> None:
        """Queue blocks, and request them as the window allows."""
        if self.is_idle:
            self._last_reply_s = now_s
        self._waiting.extend(wanted)
        self._ask(now_s)

    def forget(self) -> None:
        """Cancel all blocks; late replies are ignored."""
        self._waiting.clear()
        self._outstanding.clear()
        self._until_s.clear()

    def left(self) -> list[WantedBlock]:
        """Return the outstanding blocks and cancel them."""
        left = [wanted for outstanding in self._outstanding.values() for wanted in outstanding.values()] + [
            *self._waiting
        ]
        self.forget()
        return left

    def close(self) -> None:
        """Close the sockets."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)

    def check(self, now_s: float) -> None:
        """Raise `PeerLost` if a timeout has expired."""
        if not self.is_idle and now_s - self._last_reply_s > REPLY_TIMEOUT_S:
            raise PeerLost(f"sent nothing for {REPLY_TIMEOUT_S:.0f} s")
        if any(now_s > until_s for until_s in self._until_s.values()):
            raise PeerLost(f"took more than {REQUEST_TIMEOUT_S:.0f} s for a request")

    def receive_event(self) -> None:
        """Read a connection event; all subscribed events end the connection. Raises `PeerLost`."""
        event: Any = recv_monitor_message(self.monitor)["event"]
        if event == zmq.EVENT_CONNECT_RETRIED:
            raise PeerLost("does not listen")
        if event == zmq.EVENT_DISCONNECTED:
            raise PeerLost("closed the connection")
        raise PeerLost("failed the handshake: its --kv-peer-key is missing or differs")

    def receive(self, now_s: float) -> Iterator[BlockArrival]:
        """Receive all waiting replies; yield the results of fetches."""
        for _ in range(MAX_FRAMES):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                answer = _decoder.decode(frames[0].buffer)
            except UNREADABLE:
                raise PeerLost("sent an invalid message") from None
            yield from self._take(answer, frames[1:], now_s)
        self._ask(now_s)

    def _take(self, answer: Answer, frames: list[zmq.Frame], now_s: float) -> Iterator[BlockArrival]:
        outstanding = self._outstanding.get(answer.number)
        if outstanding is None:
            return  # cancelled
        self._last_reply_s = now_s
        if isinstance(answer, IdentityMismatch):
            raise PeerLost(f"has another identity: its {self._differing(answer)} differ", MISMATCH_BACKOFF_S)
        if isinstance(answer, BlocksMissing):
            del self._outstanding[answer.number], self._until_s[answer.number]
            yield from (BlockArrival(wanted, is_there=False) for wanted in outstanding.values())
            return
        wanted = outstanding.get(answer.index)
        if wanted is None or len(frames) != 1:
            raise PeerLost("sent a block that was not requested")
        self._store(answer, wanted, memoryview(frames[0].buffer))
        del outstanding[answer.index]
        yield BlockArrival(wanted, is_there=True)

    def _store(self, reply: BlockReply, wanted: WantedBlock, block: memoryview) -> None:
        """Store a block in its staging block after verifying its hash."""
        row = self._staging[wanted.host_block - self._first]
        if len(block) != len(row) or digest_of(self._identity, wanted.key, block) != reply.digest:
            raise PeerLost("sent a block with a wrong hash", MISMATCH_BACKOFF_S)
        row.data[:] = block

    def _differing(self, answer: IdentityMismatch) -> str:
        """Return the differing parts by our own names; the peer's names are untrusted."""
        differing = sorted(name for name, part in self._parts.items() if part != answer.parts.get(name))
        return ", ".join(differing) or "version"

    def _ask(self, now_s: float) -> None:
        while self._waiting and len(self._outstanding) < MAX_REQUESTS:
            count = min(self._window, len(self._waiting))
            outstanding = {index: self._waiting.popleft() for index in range(count)}
            self._last_number += 1
            self._outstanding[self._last_number], self._until_s[self._last_number] = (
                outstanding,
                now_s + REQUEST_TIMEOUT_S,
            )
            keys = [wanted.key for wanted in outstanding.values()]
            try:
                self.socket.send(encode(Ask(VERSION, self._last_number, self._identity, keys)), zmq.NOBLOCK)
            except zmq.Again:  # the connection is gone after a protocol error, before its event
                raise PeerLost("closed the connection") from None
