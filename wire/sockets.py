"""Inboxes and outboxes over ZeroMQ.

Each process binds one PULL socket, its inbox, at an address that names its epoch, and connects a PUSH socket to every
inbox it writes to. Sends never block and never wait for a peer to exist; what is queued for a dead process is thrown
away when the topology names its successor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from quintet.wire import codec
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Seat, SeatState

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def address_of(run_dir: str | Path, worker: WorkerId) -> str:
    """Return where a local process's inbox is bound."""
    return f"ipc://{run_dir}/{worker}"


class Inbox(Generic[MessageT]):
    """A process's one PULL socket, decoding into the union of messages it accepts.

    A frame that does not decode is dropped and counted in ``num_rejected``: no peer of ours sends one.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, accepts: type[MessageT]
    ) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        if address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        self._socket.bind(address)
        self._decode = msgspec.msgpack.Decoder(accepts).decode
        self._timeout_ms = -1
        self._path = address.removeprefix("ipc://") if address.startswith("ipc://") else None
        self.address = address
        self.num_rejected = 0

    def fileno(self) -> int:
        """Return the descriptor that becomes readable, once, when frames arrive: call `drain` each time it does."""
        return int(self._socket.getsockopt(zmq.FD))

    def drain(self) -> list[MessageT]:
        """Return everything that has arrived, without waiting."""
        messages: list[MessageT] = []
        receive, decode = self._socket.recv, self._decode
        while True:
            try:
                frame = receive(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode(frame))
            except msgspec.MsgspecError:
                self.num_rejected += 1

    def wait(self, timeout_s: float) -> list[MessageT]:
        """Return everything that has arrived, waiting up to ``timeout_s`` for the first frame."""
        messages = self.drain()
        if messages or timeout_s <= 0:
            return messages
        timeout_ms = max(1, int(timeout_s * 1000))
        if timeout_ms != self._timeout_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
            self._timeout_ms = timeout_ms
        try:
            frame = self._socket.recv()
        except zmq.Again:
            return messages
        try:
            messages.append(self._decode(frame))
        except msgspec.MsgspecError:
            self.num_rejected += 1
        messages += self.drain()
        return messages

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close(linger=0)
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)


class Peers:
    """Outboxes to the other processes, by role and index, following the topology."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._outboxes: dict[tuple[Role, int], tuple[WorkerId, zmq.Socket[bytes]]] = {}

    def connect(self, worker: WorkerId, address: str) -> None:
        """Open an outbox to ``worker``, closing the one to an earlier epoch with whatever it still held."""
        key = (worker.role, worker.index)
        known = self._outboxes.get(key)
        if known is not None:
            if known[0] == worker:
                return
            known[1].close(linger=0)
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 200)
        socket.connect(address)
        self._outboxes[key] = (worker, socket)

    def follow(self, seats: Iterable[Seat]) -> list[WorkerId]:
        """Connect to every seat that is filled; return the workers that replaced an earlier epoch."""
        replaced = []
        for seat in seats:
            if seat.state is SeatState.DOWN:
                continue
            known = self._outboxes.get((seat.worker.role, seat.worker.index))
            if known is not None and known[0] != seat.worker:
                replaced.append(seat.worker)
            self.connect(seat.worker, seat.address)
        return replaced

    def send(self, role: Role, index: int, message: msgspec.Struct) -> bool:
        """Queue a message for a peer. Return False when the topology has no such peer."""
        return self.send_frame(role, index, codec.encode(message))

    def send_frame(self, role: Role, index: int, frame: bytes) -> bool:
        """Queue an encoded message for a peer."""
        outbox = self._outboxes.get((role, index))
        if outbox is None:
            return False
        outbox[1].send(frame, zmq.NOBLOCK)
        return True

    def epoch(self, role: Role, index: int) -> int | None:
        """Return the epoch of the peer that sends go to now."""
        outbox = self._outboxes.get((role, index))
        return None if outbox is None else outbox[0].epoch

    def close(self) -> None:
        """Close every outbox; what is queued for living peers still gets a moment to leave."""
        for _, socket in self._outboxes.values():
            socket.close()
        self._outboxes.clear()


def make_run_dir(parent: str | Path | None = None) -> Path:
    """Create a folder for one server's sockets, readable by its user alone.

    Unix socket paths are limited to 107 bytes, so the folder lies directly under ``parent`` (default: the system's
    temporary folder).
    """
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="quintet-", dir=parent))
    os.chmod(path, 0o700)
    return path
