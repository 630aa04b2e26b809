"""Wakeups of an inbox from threads: one message for several calls, recorded like a frame."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.process.wakeup import Wakeup
from quintet.wire import codec
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_tiers import TierResultsReady
from quintet.wire.messages import Cancel
from quintet.wire.step import StepsEnded

CORE = WorkerId(Role.CORE, 0, 1)
LONG_S = 60.0
"""Longer than the wait of any passing test."""


class WakeableInbox:
    """An inbox with a wakeup, its recorded payloads, and a peer that sends to it."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.seen: list[bytes] = []
        self.inbox: Inbox[Cancel] = Inbox(
            bus, address_of(folder, CORE), Cancel, tap=lambda payload: self.seen.append(bytes(payload))
        )
        self.wakeup = Wakeup(StepsEnded)
        self.inbox.add_wakeup(self.wakeup)
        self.peers = Peers(bus)
        self.peers.connect(CORE, self.inbox.address)


@pytest.fixture
def wakeable(tmp_path: Path) -> Iterator[WakeableInbox]:
    bus = Bus(tmp_path)
    wakeable = WakeableInbox(bus, tmp_path)
    yield wakeable
    wakeable.inbox.close()
    wakeable.peers.close()
    wakeable.wakeup.close()
    bus.context.destroy(linger=0)


def test_wakeup_from_a_thread_ends_the_wait(wakeable: WakeableInbox) -> None:
    timer = threading.Timer(0.05, wakeable.wakeup.notify)
    timer.start()
    assert wakeable.inbox.wait(LONG_S) == [StepsEnded(1)]
    timer.join()


def test_wakeups_are_one_message_before_the_frames(wakeable: WakeableInbox) -> None:
    wakeable.peers.send(Role.CORE, 0, Cancel([1], 0))
    assert wakeable.inbox.wait(LONG_S) == [Cancel([1], 0)]
    for _ in range(3):
        wakeable.wakeup.notify()
    assert wakeable.inbox.wait(LONG_S) == [StepsEnded(3)]
    assert wakeable.inbox.wait(0.001) == [], "a wakeup is delivered once"
    assert wakeable.seen == [codec.encode(Cancel([1], 0)), codec.encode(StepsEnded(3))]


def test_frame_ends_the_wait(wakeable: WakeableInbox) -> None:
    sender = threading.Timer(0.05, lambda: wakeable.peers.send(Role.CORE, 0, Cancel([1], 0)))
    sender.start()
    assert wakeable.inbox.wait(LONG_S) == [Cancel([1], 0)]
    sender.join()


def test_two_wakeups_are_delivered_in_order_of_registration(wakeable: WakeableInbox) -> None:
    """Executors of pipeline stages wait for steps and for the disk."""
    other = Wakeup(TierResultsReady)
    wakeable.inbox.add_wakeup(other)
    other.notify()
    assert wakeable.inbox.wait(LONG_S) == [TierResultsReady(1)]
    other.notify()
    wakeable.wakeup.notify()
    assert wakeable.inbox.wait(LONG_S) == [StepsEnded(1), TierResultsReady(1)]
    other.close()
