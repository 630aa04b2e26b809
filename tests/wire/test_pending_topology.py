"""Messages that wait for a topology: order, bound, and which epoch is after which."""

from __future__ import annotations

import pytest

from quintet.process.pending_topology import PendingTopology
from quintet.wire.ids import epoch_tag, is_newer


def test_what_a_sender_sends_stays_in_order_and_is_taken_once() -> None:
    early: PendingTopology[str, int] = PendingTopology(10)
    for sender, message in (("a", 1), ("b", 2), ("a", 3)):
        assert early.keep(sender, message)
    assert "a" in early and "c" not in early and early
    taken = early.take()
    assert sorted(taken) == [1, 2, 3] and taken.index(1) < taken.index(3)
    assert not early and early.take() == []


def test_what_would_be_too_much_is_not_kept() -> None:
    early: PendingTopology[str, bytes] = PendingTopology(10, len)
    assert early.keep("a", bytes(6)) and not early.keep("b", bytes(5)) and early.keep("b", bytes(4))
    assert early.size == 10
    assert "c" not in early and len(early.take()) == 2
    assert early.keep("c", bytes(10))


@pytest.mark.parametrize("epoch", (1, 4095, 8191, 8192, 123_456))
def test_tags_wrap(epoch: int) -> None:
    assert not is_newer(epoch_tag(epoch), epoch)
    assert is_newer(epoch_tag(epoch + 1), epoch) and not is_newer(epoch_tag(epoch - 1), epoch)
    assert is_newer(epoch_tag(epoch + 4095), epoch) and not is_newer(epoch_tag(epoch - 4095), epoch)
