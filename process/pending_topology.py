"""What came before its time: messages of senders that know a newer topology, until that comes here too.

Processes hear of a change at different moments. Who is sent something by a process that it has not heard of, or that has
heard of more, would answer to the dead or to nobody; so the message waits, and what its sender sent after it waits
behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

SenderT = TypeVar("SenderT")
MessageT = TypeVar("MessageT")


class PendingTopology(Generic[SenderT, MessageT]):
    """Messages by sender, in order, of a bounded size."""

    def __init__(self, capacity: int, size_of: Callable[[MessageT], int] = lambda _: 1) -> None:
        """``capacity``: of the sizes of all; without ``size_of``, messages."""
        self._capacity = capacity
        self._size_of = size_of
        self._waiting: dict[SenderT, list[MessageT]] = {}
        self.size = 0
        """Of all that waits."""

    def __contains__(self, sender: SenderT) -> bool:
        """Whether something of this sender waits: what it sends now must not overtake it."""
        return sender in self._waiting

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def keep(self, sender: SenderT, message: MessageT) -> bool:
        """Have a message wait. False: it would be too much, and its sender must be told."""
        size = self._size_of(message)
        if self.size + size > self._capacity:
            return False
        self.size += size
        self._waiting.setdefault(sender, []).append(message)
        return True

    def take(self) -> list[MessageT]:
        """Return all that waits, of each sender in order, and forget it: a newer topology is here."""
        waiting, self._waiting, self.size = self._waiting, {}, 0
        return [message for messages in waiting.values() for message in messages]
