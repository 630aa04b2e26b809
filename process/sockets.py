"""Inboxes and outboxes over ZeroMQ.

Each process binds one PULL socket, its inbox, at an address that contains its epoch, and connects a PUSH socket to
every inbox it writes to. Sends never block and do not need an existing peer. Messages queued for a dead process are
discarded when the topology names its successor.

Every frame carries an HMAC, which proves that the sender has the key of the run folder. It does not detect repeated
frames, so receivers drop messages that they have already applied.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, get_args

import msgspec
import zmq

from quintet.process.wakeup import Wakeup
from quintet.wire import codec
from quintet.wire.codec import UNREADABLE
from quintet.wire.dropped import Dropped, carried_by, carried_by_bytes
from quintet.wire.ids import Role, WorkerId
from quintet.wire.limits import LEAST_BYTES, FrameTooLarge
from quintet.wire.supervision import ProcessSlot, SlotState

MessageT = TypeVar("MessageT", bound=msgspec.Struct)

KEY_FILE = "key"
KEY_BYTES = 32
HMAC_BYTES = 16


def run_key(run_dir: str | Path) -> bytes:
    """Return the key of the server in this folder; the first call creates it, readable only by its user."""
    path = Path(run_dir) / KEY_FILE
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    unfinished = path.with_name(f".{KEY_FILE}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, os.urandom(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)  # atomic: if two processes create it, both read the winner's
    finally:
        os.close(descriptor)
        unfinished.unlink()
    return path.read_bytes()


class FrameHmac:
    """Adds and checks HMAC-SHA-256 (RFC 2104), truncated to `HMAC_BYTES`.

    CPU instructions make it twice as fast as keyed BLAKE2b for the frames of a large step. Both pads are hashed once
    here instead of per frame.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"the key has {len(key)} bytes, but {KEY_BYTES} are expected: its file is damaged"
            )
        block = key.ljust(hashlib.sha256().block_size, b"\0")
        self._begin_inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block)).copy
        self._begin_outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block)).copy

    def _digest(self, payload: bytes | memoryview) -> bytes:
        inner, outer = self._begin_inner(), self._begin_outer()
        inner.update(payload)
        outer.update(inner.digest())
        return outer.digest()[:HMAC_BYTES]

    def sign(self, payload: bytes) -> bytes:
        """Return the frame that carries ``payload``."""
        return payload + self._digest(payload)

    def verify(self, frame: bytes) -> memoryview | None:
        """Return the payload of a frame, or None when its HMAC is invalid."""
        payload = memoryview(frame)[:-HMAC_BYTES]
        return payload if hmac.compare_digest(self._digest(payload), frame[-HMAC_BYTES:]) else None


def address_of(run_dir: str | Path, worker: WorkerId) -> str:
    """Return the address of a local process's inbox."""
    return f"ipc://{run_dir}/{worker}"


class Outbox(Protocol):
    """Connection to one other process's inbox."""

    def send(self, payload: bytes) -> None:
        """Queue an encoded message; never waits."""

    def close(self, *, drop: bool) -> None:
        """Close, dropping queued messages or allowing a short time to send them."""


class OpensOutboxes(Protocol):
    """Connections that `Peers` sends through: the sockets of this process, or a recording of them."""

    def open_outbox(self, worker: WorkerId, address: str) -> Outbox:
        """Return an outbox to ``worker``, which need not exist yet."""


class Bus:
    """The sockets of one process, and the key of its server."""

    def __init__(self, run_dir: str | Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.hmac = FrameHmac(run_key(run_dir))

    def open_outbox(self, worker: WorkerId, address: str) -> Outbox:
        """Return a PUSH socket that connects, and reconnects, to ``address``."""
        socket = self.context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 200)
        socket.connect(address)
        return _PushSocket(socket, self.hmac)

    def close(self) -> None:
        """End ZeroMQ's threads. Inboxes and outboxes must be closed before."""
        self.context.term()


class _PushSocket:
    """An `Outbox` over ZeroMQ."""

    def __init__(self, socket: zmq.Socket[bytes], hmac: FrameHmac) -> None:
        self._socket = socket
        self._sign = hmac.sign

    def send(self, payload: bytes) -> None:
        self._socket.send(self._sign(payload), zmq.NOBLOCK)

    def close(self, *, drop: bool) -> None:
        self._socket.close(linger=0 if drop else None)


class Rejection(enum.Enum):
    """Reason for which an inbox dropped a frame."""

    FORGED = "forged"
    """Without a valid HMAC of this server's key."""
    UNREADABLE = "unreadable"
    """Valid HMAC, but not a message that this process accepts."""
    INVALID = "invalid"
    """A message with invalid lengths or numbers (`quintet.wire.validate`)."""


Accepts = Callable[[msgspec.Struct], bool]
"""Returns True for a valid message."""

Tap = Callable[[memoryview], None]
"""Called with the payload of every accepted frame."""


class Inbox(Generic[MessageT]):
    """A process's PULL socket, decoding into the union of messages it accepts.

    A frame with an invalid HMAC, encoding or content is dropped and counted in ``rejected``; our processes send none.
    If its HMAC is valid and it carried a request or query, a `Dropped` takes its position. ZeroMQ rejects frames of
    more than ``max_bytes`` and closes their connection.
    """

    def __init__(
        self,
        bus: Bus,
        address: str,
        accepts: type[MessageT],
        max_bytes: int = LEAST_BYTES,
        is_valid: Accepts | None = None,
        tap: Tap | None = None,
    ) -> None:
        self._socket = bus.context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + HMAC_BYTES)
        self._path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._socket.bind(address)
        self._verify = bus.hmac.verify
        self._decode = msgspec.msgpack.Decoder(accepts).decode
        self._kinds = frozenset(get_args(accepts) or (accepts,))
        self._makes_sense = is_valid
        self._tap = tap
        self._timeout_ms: int | None = None
        self._wakeups: list[Wakeup] = []
        self._poller = zmq.Poller()
        self.address = address
        self.rejected = dict.fromkeys(Rejection, 0)

    def add_wakeup(self, wakeup: Wakeup) -> None:
        """Make `wait` also return on ``wakeup``; its messages precede those of frames."""
        if not self._wakeups:
            self._poller.register(self._socket, zmq.POLLIN)
        self._wakeups.append(wakeup)
        self._poller.register(wakeup.fileno(), zmq.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable, once, when frames arrive: call `drain` each time it does."""
        return int(self._socket.getsockopt(zmq.FD))

    def drain(self) -> list[MessageT]:
        """Return all messages that have arrived, without waiting."""
        messages: list[MessageT] = []
        for wakeup in self._wakeups:
            message = wakeup.answer()
            if message is not None:
                self._append(message, messages)
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return messages  # usually there is one frame, and catching zmq.Again for the next costs more
        receive, take = self._socket.recv, self._take
        while True:
            try:
                frame = receive(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            take(frame, messages)

    def wait(self, timeout_s: float) -> list[MessageT]:
        """Return all messages that have arrived, waiting up to ``timeout_s`` for the first frame."""
        messages = self.drain()
        if messages or timeout_s <= 0:
            return messages
        timeout_ms = max(1, int(timeout_s * 1000))
        if self._wakeups:
            self._poller.poll(timeout_ms)
            return self.drain()
        if timeout_ms != self._timeout_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
            self._timeout_ms = timeout_ms
        try:
            frame = self._socket.recv()
        except zmq.Again:
            return messages
        self._take(frame, messages)
        return messages + self.drain()

    def _take(self, frame: bytes, messages: list[MessageT]) -> None:
        """Append the frame's message, if it is valid."""
        payload = self._verify(frame)
        if payload is None:
            self.rejected[Rejection.FORGED] += 1
            return
        try:
            message = self._decode(payload)
        except UNREADABLE:
            self._drop(Rejection.UNREADABLE, carried_by_bytes(payload, self._kinds), messages)
            return
        if self._makes_sense is not None and not self._makes_sense(message):
            self._drop(Rejection.INVALID, carried_by(message), messages)
            return
        messages.append(message)
        if self._tap is not None:
            self._tap(payload)

    def _drop(self, why: Rejection, dropped: Dropped | None, messages: list[Any]) -> None:
        """Count a dropped frame, and append a `Dropped` for its requests."""
        self.rejected[why] += 1
        if dropped is not None:
            self._append(dropped, messages)

    def _append(self, message: msgspec.Struct, messages: list[Any]) -> None:
        """Append a message that arrived in no frame."""
        messages.append(message)
        if self._tap is not None:
            self._tap(memoryview(codec.encode(message)))

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close(linger=0)
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Peers:
    """Outboxes to the other processes, by role and index, following the topology."""

    def __init__(
        self,
        bus: OpensOutboxes,
        most_bytes: Mapping[Role, int] | None = None,
        tap: Callable[[WorkerId, bytes], None] | None = None,
    ) -> None:
        """``most_bytes``: maximum payload per role (`quintet.wire.limits`); None for no limits.

        ``tap`` is called with every frame that is sent.
        """
        self._bus = bus
        self._tap = tap
        self._most_bytes = most_bytes if most_bytes is not None else dict.fromkeys(Role, sys.maxsize)
        self._outboxes: dict[tuple[Role, int], tuple[WorkerId, Outbox | None]] = {}
        """Newest worker of each slot, and its outbox; None once the slot is retired."""

    def connect(self, worker: WorkerId, address: str) -> None:
        """Open an outbox to ``worker``; close the one to an earlier epoch and discard its queue."""
        key = (worker.role, worker.index)
        known = self._outboxes.get(key)
        if known is not None:
            if known[0] == worker:
                return
            if known[1] is not None:
                known[1].close(drop=True)
        self._outboxes[key] = (worker, self._bus.open_outbox(worker, address))

    def follow(self, slots: Iterable[ProcessSlot]) -> list[WorkerId]:
        """Connect to every active slot and close retired ones; return the workers that replaced an earlier epoch."""
        replaced = []
        for slot in slots:
            if slot.state is SlotState.DOWN:
                if slot.retired:
                    self._give_up(slot.worker)
                continue
            known = self._outboxes.get((slot.worker.role, slot.worker.index))
            if known is not None and known[0] != slot.worker:
                replaced.append(slot.worker)
            self.connect(slot.worker, slot.address)
        return replaced

    def _give_up(self, worker: WorkerId) -> None:
        """Close the outbox to a retired worker; its epoch is remembered."""
        key = (worker.role, worker.index)
        known = self._outboxes.get(key)
        if known is not None and known[1] is not None and known[0] == worker:
            known[1].close(drop=True)
            self._outboxes[key] = (worker, None)

    def send(self, role: Role, index: int, message: msgspec.Struct) -> bool:
        """Queue a message for a peer. Return False when the topology has no such peer, or has retired it.

        Raises `FrameTooLarge` if the peer would reject it: sent, it would be lost with the frames queued after it.
        """
        return self.send_payload(role, index, codec.encode(message))

    def send_payload(self, role: Role, index: int, payload: bytes) -> bool:
        """Queue an encoded message for a peer."""
        known = self._outboxes.get((role, index))
        if known is None or known[1] is None:
            return False
        if len(payload) > self._most_bytes[role]:
            raise FrameTooLarge(len(payload), role, self._most_bytes[role])
        if self._tap is not None:
            self._tap(known[0], payload)
        known[1].send(payload)
        return True

    def epoch(self, role: Role, index: int) -> int | None:
        """Return the epoch of the current peer, or of the last one if the slot is retired."""
        outbox = self._outboxes.get((role, index))
        return None if outbox is None else outbox[0].epoch

    def close(self) -> None:
        """Close every outbox, allowing a short time to send queued messages."""
        for _, outbox in self._outboxes.values():
            if outbox is not None:
                outbox.close(drop=False)
        self._outboxes.clear()
