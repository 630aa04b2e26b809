"""Queue of messages from senders with a newer topology, until it arrives.

Processes receive a topology at different times. A receiver with an older one might answer to a dead or unknown
process. So the message waits, and later messages of its sender wait after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

SenderT = TypeVar("SenderT")
MessageT = TypeVar("MessageT")


class PendingTopology(Generic[SenderT, MessageT]):
    """Messages by sender, in order, with a bounded total size."""

    def __init__(self, capacity: int, size_of: Callable[[MessageT], int] = lambda _: 1) -> None:
        """``capacity``: maximum total size; without ``size_of``, number of messages."""
        self._capacity = capacity
        self._size_of = size_of
        self.waiting: dict[SenderT, list[MessageT]] = {}
        """Messages in order, by sender. Later messages of these senders must not overtake them."""
        self.size = 0
        """Total size of the queue."""

    def enqueue(self, sender: SenderT, message: MessageT) -> bool:
        """Queue a message. Return False when the queue is full; the caller must notify the sender."""
        size = self._size_of(message)
        if self.size + size > self._capacity:
            return False
        self.size += size
        self.waiting.setdefault(sender, []).append(message)
        return True

    def take(self) -> list[MessageT]:
        """Return all queued messages, in order per sender, and clear the queue; called after a topology update."""
        waiting, self.waiting, self.size = self.waiting, {}, 0
        return [message for messages in waiting.values() for message in messages]
