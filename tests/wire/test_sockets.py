"""Inboxes and outboxes over real sockets."""

import hmac
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.process.sockets import (
    HMAC_BYTES,
    KEY_BYTES,
    KEY_FILE,
    Bus,
    FrameHmac,
    Inbox,
    Peers,
    Rejection,
    address_of,
    run_key,
)
from quintet.wire import codec
from quintet.wire.ids import Role, WorkerId
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import Cancel, StopHit
from quintet.wire.supervision import Drain, ProcessSlot, SlotState

CORE = WorkerId(Role.CORE, 0, 1)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    bus = Bus(tmp_path)
    yield bus
    bus.context.destroy(linger=0)


def frames_to(bus: Bus, address: str) -> "zmq.Socket[bytes]":
    """Return a socket that sends raw frames."""
    socket = bus.context.socket(zmq.PUSH)
    socket.connect(address)
    return socket


def receive(inbox: Inbox[Cancel], num: int) -> list[Cancel]:
    received: list[Cancel] = []
    deadline = time.monotonic() + 5.0
    while len(received) < num:  # a wait ends with no message when a received frame is dropped
        assert time.monotonic() < deadline, "too few messages within 5 s"
        received += inbox.wait(1.0)
    return received


def test_messages_arrive_in_order_and_typed(bus: Bus, tmp_path: Path) -> None:
    inbox: Inbox[Cancel] = Inbox(bus, address_of(tmp_path, CORE), Cancel)
    peers = Peers(bus)
    peers.connect(CORE, inbox.address)
    for i in range(100):
        assert peers.send(Role.CORE, 0, Cancel([i], 0))
    received = receive(inbox, 100)
    assert [message.request_ids[0] for message in received] == list(range(100))
    peers.close()
    inbox.close()


def test_random_bytes_are_counted_and_dropped(bus: Bus, tmp_path: Path) -> None:
    inbox: Inbox[Cancel] = Inbox(bus, address_of(tmp_path, CORE), Cancel)
    peers = Peers(bus)
    peers.connect(CORE, inbox.address)
    peers.send_payload(Role.CORE, 0, b"\xc1 not msgpack")
    peers.send_payload(Role.CORE, 0, b"\x93\xa6cancel\x90\xa2\xd5\xd5")  # invalid UTF-8
    peers.send_payload(Role.CORE, 0, b"\x91" * 100_000)  # nested lists
    peers.send(Role.CORE, 0, StopHit(b""))
    peers.send(Role.CORE, 0, Cancel([1], 0))
    assert receive(inbox, 1) == [Cancel([1], 0)]
    assert inbox.rejected == {**dict.fromkeys(Rejection, 0), Rejection.UNREADABLE: 4}
    peers.close()
    inbox.close()


def test_frame_without_a_valid_hmac_is_not_decoded(bus: Bus, tmp_path: Path) -> None:
    inbox: Inbox[Cancel] = Inbox(bus, address_of(tmp_path, CORE), Cancel)
    foreign_socket = frames_to(bus, inbox.address)
    payload, key = codec.encode(Cancel([7], 0)), run_key(tmp_path)
    signed = FrameHmac(key).sign(payload)
    forged = [
        b"",
        payload,
        payload + bytes(HMAC_BYTES),
        FrameHmac(os.urandom(KEY_BYTES)).sign(payload),
        *(signed[:i] + bytes([signed[i] ^ 1]) + signed[i + 1 :] for i in range(len(signed))),
        signed[:-1],
        signed + b"\0",
    ]
    for frame in forged:
        foreign_socket.send(frame)
    foreign_socket.send(signed)
    assert receive(inbox, 1) == [Cancel([7], 0)]
    assert inbox.rejected[Rejection.FORGED] == len(forged) == sum(inbox.rejected.values())
    foreign_socket.close(linger=0)
    inbox.close()


def test_oversized_frame_is_not_received(bus: Bus, tmp_path: Path) -> None:
    inbox: Inbox[Cancel] = Inbox(bus, address_of(tmp_path, CORE), Cancel, max_bytes=100)
    frame_hmac = FrameHmac(run_key(tmp_path))
    long_one, short_one = codec.encode(Cancel([1 << 40] * 20, 0)), codec.encode(Cancel([1], 0))
    first, second = frames_to(bus, inbox.address), frames_to(bus, inbox.address)
    first.send(frame_hmac.sign(long_one))
    second.send(frame_hmac.sign(short_one))
    assert receive(inbox, 1) == [Cancel([1], 0)]
    assert inbox.wait(0.05) == []
    first.close(linger=0)
    second.close(linger=0)
    inbox.close()


def test_oversized_frame_is_not_sent(bus: Bus, tmp_path: Path) -> None:
    """ZeroMQ would drop it and the frames queued after it."""
    inbox: Inbox[Cancel] = Inbox(bus, address_of(tmp_path, CORE), Cancel, max_bytes=100)
    peers = Peers(bus, {Role.CORE: 100})
    peers.connect(CORE, inbox.address)
    with pytest.raises(FrameTooLarge, match="for the core, which accepts at most 100") as caught:
        peers.send(Role.CORE, 0, Cancel([1 << 40] * 20, 0))
    assert caught.value.num_bytes > caught.value.most == 100
    assert peers.send(Role.CORE, 0, Cancel([1], 0))
    assert receive(inbox, 1) == [Cancel([1], 0)]
    peers.close()
    inbox.close()


def test_frames_for_a_dead_epoch_do_not_reach_the_next_one(bus: Bus, tmp_path: Path) -> None:
    first, second = WorkerId(Role.EXECUTOR, 0, 1), WorkerId(Role.EXECUTOR, 0, 2)
    peers = Peers(bus)
    peers.connect(first, address_of(tmp_path, first))
    peers.send(Role.EXECUTOR, 0, Cancel([1], 0))
    inbox: Inbox[Cancel] = Inbox(bus, address_of(tmp_path, second), Cancel)
    replaced = peers.follow([ProcessSlot(second, inbox.address, 1, SlotState.READY)])
    assert replaced == [second]
    peers.send(Role.EXECUTOR, 0, Cancel([2], 0))
    assert inbox.wait(5.0) == [Cancel([2], 0)]
    peers.close()
    inbox.close()


def test_send_without_a_peer_returns_false(bus: Bus) -> None:
    peers = Peers(bus)
    assert not peers.send(Role.FRONTEND, 4, Drain())
    peers.close()


def test_retired_peer_receives_nothing_and_its_epoch_is_kept(bus: Bus, tmp_path: Path) -> None:
    worker = WorkerId(Role.DETOKENIZER, 1, 1)
    peers = Peers(bus)
    peers.follow([ProcessSlot(worker, address_of(tmp_path, worker), 1, SlotState.RETIRING)])
    assert peers.send(Role.DETOKENIZER, 1, Drain()), "a draining peer still receives messages"
    gone = ProcessSlot(worker, address_of(tmp_path, worker), 1, SlotState.DOWN, retired=True)
    assert peers.follow([gone]) == []
    assert not peers.send(Role.DETOKENIZER, 1, Drain())
    assert peers.epoch(Role.DETOKENIZER, 1) == 1
    replacement = WorkerId(Role.DETOKENIZER, 1, 2)
    assert peers.follow(
        [ProcessSlot(replacement, address_of(tmp_path, replacement), 1, SlotState.READY)]
    ) == [replacement]
    assert peers.send(Role.DETOKENIZER, 1, Drain())
    peers.close()


def test_the_run_dir_and_the_key_are_private(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    key = run_key(run_dir)
    assert len(key) == KEY_BYTES and run_key(run_dir) == key
    assert stat.S_IMODE((run_dir / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in run_dir.iterdir()] == [KEY_FILE]
    assert run_key(make_run_dir(tmp_path)) != key


def test_frame_hmac_equals_the_standard_library() -> None:
    key = os.urandom(KEY_BYTES)
    for payload in (b"", b"a", os.urandom(64), os.urandom(5000)):
        frame = FrameHmac(key).sign(payload)
        assert frame == payload + hmac.digest(key, payload, "sha256")[:HMAC_BYTES]
        assert FrameHmac(key).verify(frame) == payload


def test_damaged_key_is_named() -> None:
    with pytest.raises(ValueError, match="5 bytes, but 32 are expected"):
        FrameHmac(b"short")
