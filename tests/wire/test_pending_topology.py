"""Messages that wait for a topology: order, size limit, epoch comparison."""

from __future__ import annotations

import pytest

from quintet.process.pending_topology import PendingTopology
from quintet.wire.ids import epoch_tag, is_newer


def test_messages_stay_in_order_and_are_taken_once() -> None:
    pending: PendingTopology[str, int] = PendingTopology(10)
    for sender, message in (("a", 1), ("b", 2), ("a", 3)):
        assert pending.enqueue(sender, message)
    assert pending.waiting == {"a": [1, 3], "b": [2]}
    taken = pending.take()
    assert sorted(taken) == [1, 2, 3] and taken.index(1) < taken.index(3)
    assert not pending.waiting and pending.take() == []


def test_messages_beyond_the_limit_are_rejected() -> None:
    pending: PendingTopology[str, bytes] = PendingTopology(10, len)
    assert (
        pending.enqueue("a", bytes(6))
        and not pending.enqueue("b", bytes(5))
        and pending.enqueue("b", bytes(4))
    )
    assert pending.size == 10
    assert len(pending.take()) == 2
    assert pending.enqueue("c", bytes(10))


@pytest.mark.parametrize("epoch", (1, 4095, 8191, 8192, 123_456))
def test_epoch_tags_wrap_around(epoch: int) -> None:
    assert not is_newer(epoch_tag(epoch), epoch)
    assert is_newer(epoch_tag(epoch + 1), epoch) and not is_newer(epoch_tag(epoch - 1), epoch)
    assert is_newer(epoch_tag(epoch + 4095), epoch) and not is_newer(epoch_tag(epoch - 4095), epoch)
