"""A bell wakes whoever waits at an inbox, and its rings become one message, in the recording too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.process.wakeup import Wakeup
from quintet.wire import codec
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_tiers import DiskResultsReady
from quintet.wire.messages import Cancel
from quintet.wire.step import StepsEnded

CORE = WorkerId(Role.CORE, 0, 1)
LONG_S = 60.0
"""Longer than any test waits that passes."""


class Door:
    """An inbox with a bell, what its tap saw, and a way to it."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.seen: list[bytes] = []
        self.inbox: Inbox[Cancel] = Inbox(
            bus, address_of(folder, CORE), Cancel, tap=lambda payload: self.seen.append(bytes(payload))
        )
        self.bell = Wakeup(StepsEnded)
        self.inbox.hang(self.bell)
        self.peers = Peers(bus)
        self.peers.connect(CORE, self.inbox.address)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    bus = Bus(tmp_path)
    door = Door(bus, tmp_path)
    yield door
    door.inbox.close()
    door.peers.close()
    door.bell.close()
    bus.context.destroy(linger=0)


def test_a_ring_from_a_thread_ends_the_wait(door: Door) -> None:
    ringer = threading.Timer(0.05, door.bell.ring)
    ringer.start()
    assert door.inbox.wait(LONG_S) == [StepsEnded(1)]
    ringer.join()


def test_rings_are_one_message_ahead_of_the_frames(door: Door) -> None:
    door.peers.send(Role.CORE, 0, Cancel([1], 0))
    assert door.inbox.wait(LONG_S) == [Cancel([1], 0)]
    for _ in range(3):
        door.bell.ring()
    assert door.inbox.wait(LONG_S) == [StepsEnded(3)]
    assert door.inbox.wait(0.001) == [], "a ring is answered once"
    assert door.seen == [codec.encode(Cancel([1], 0)), codec.encode(StepsEnded(3))]


def test_a_frame_ends_the_wait_as_before(door: Door) -> None:
    sender = threading.Timer(0.05, lambda: door.peers.send(Role.CORE, 0, Cancel([1], 0)))
    sender.start()
    assert door.inbox.wait(LONG_S) == [Cancel([1], 0)]
    sender.join()


def test_two_bells_are_answered_in_the_order_in_which_they_were_hung(door: Door) -> None:
    """An executor of stages waits for steps, and for the disk."""
    other = Wakeup(DiskResultsReady)
    door.inbox.hang(other)
    other.ring()
    assert door.inbox.wait(LONG_S) == [DiskResultsReady(1)]
    other.ring()
    door.bell.ring()
    assert door.inbox.wait(LONG_S) == [StepsEnded(1), DiskResultsReady(1)]
    other.close()
