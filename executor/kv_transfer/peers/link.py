"""Client connection to one peer server, for one fetch: requests blocks, and returns them as they arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from quintet.executor.kv_transfer.kv_identity import digest_of
from quintet.executor.kv_transfer.peers.keys import Context
from quintet.executor.kv_transfer.peers.messages import (
    MAX_HEAD_BYTES,
    VERSION,
    Answer,
    Ask,
    BlocksMissing,
    IdentityMismatch,
    OwnIdentity,
    max_requests,
)
from quintet.wire.codec import UNREADABLE, encode

POLL_MS = 200
"""Interval between checks of timeouts and cancellation."""
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


class Link:
    """Used by one thread at a time."""

    def __init__(self, context: Context, peer: str, own: OwnIdentity, block_bytes: int) -> None:
        """Raises `zmq.ZMQError` if ``peer`` is not a valid address."""
        self._own, self._block_bytes = own, block_bytes
        self._max_requests = max_requests(block_bytes)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, self._max_requests)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_HEAD_BYTES, block_bytes))
        if peer.startswith("["):
            self._socket.setsockopt(zmq.IPV6, 1)
        own.key.protect(self._socket, listens=False)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_LOST_EVENTS)
        try:
            self._socket.connect(f"tcp://{peer}")
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def fetch(
        self, keys: Sequence[bytes], is_cancelled: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[int, memoryview | None]]:
        """Yield index and content of each block as it arrives, with a verified hash; None for a missing block.

        Ends early after a cancellation. Raises `PeerLost`.
        """
        waiting = deque(enumerate(keys, 1))
        in_flight: dict[int, float] = {}
        """Request number, from 1 in the order of ``keys`` -> deadline; oldest first."""
        last_reply_s = time.monotonic()
        while (waiting or in_flight) and not is_cancelled():
            while waiting and len(in_flight) < self._max_requests:
                number, key = waiting.popleft()
                self._ask(number, key)
                in_flight[number] = time.monotonic() + REQUEST_TIMEOUT_S
            received, now_s = self._receive(), time.monotonic()
            if received is not None and received[0].number in in_flight:
                answer, frames = received
                del in_flight[answer.number]
                last_reply_s, index = now_s, answer.number - 1
                yield index, self._block(answer, keys[index], frames)
            if in_flight and now_s - last_reply_s > REPLY_TIMEOUT_S:
                raise PeerLost(f"sent nothing for {REPLY_TIMEOUT_S:.0f} s")
            if in_flight and now_s > next(iter(in_flight.values())):
                raise PeerLost(f"took more than {REQUEST_TIMEOUT_S:.0f} s for a request")

    def _ask(self, number: int, key: bytes) -> None:
        try:
            self._socket.send(encode(Ask(VERSION, number, self._own.identity, [key])), zmq.NOBLOCK)
        except zmq.Again:  # the connection is gone after a protocol error, before its event
            raise PeerLost("closed the connection") from None

    def _receive(self) -> tuple[Answer, list[zmq.Frame]] | None:
        """Return the next message and its frames, if there is one within `POLL_MS`.

        A connection event ends the link, after all messages. Raises `PeerLost`.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = {source for source, _ in poller.poll(POLL_MS)}
        if self._socket in ready:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                return _decoder.decode(frames[0].buffer), frames
            except UNREADABLE:
                raise PeerLost("sent an invalid message") from None
        if self._monitor not in ready:
            return None
        event: Any = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_CONNECT_RETRIED:
            raise PeerLost("does not listen")
        if event == zmq.EVENT_DISCONNECTED:
            raise PeerLost("closed the connection")
        raise PeerLost("failed the handshake: its --kv-peer-key is missing or differs")

    def _block(self, answer: Answer, key: bytes, frames: Sequence[zmq.Frame]) -> memoryview | None:
        """Return the received block of this key; None if the server does not have it."""
        if isinstance(answer, BlocksMissing):
            return None
        if isinstance(answer, IdentityMismatch):
            # By our own names: the peer's names are untrusted.
            differing = sorted(
                name for name, part in self._own.parts.items() if part != answer.parts.get(name)
            )
            words = ", ".join(differing) or "version"
            raise PeerLost(f"has another identity: its {words} differ", MISMATCH_BACKOFF_S)
        if answer.index or len(frames) != 2:
            raise PeerLost("sent a block that was not requested")
        block = memoryview(frames[1].buffer)
        if len(block) != self._block_bytes or digest_of(self._own.identity, key, block) != answer.digest:
            raise PeerLost("sent a block with a wrong hash", MISMATCH_BACKOFF_S)
        return block
