"""Prefetches: what waiting requests want of a tier that takes its time, and the host blocks that it comes to.

A request's wish is *pending* until the executor has answered for all of it; the plan that lets the request enter copies the
contents to the device. A host block that is being written gets no other content before the answer is here, whoever wanted it:

      free ──── ask ───▶ awaited ──── answered ───▶ holds a content ──── nobody wants it any more ───▶ free

Knows neither where contents come from nor what that costs: `quintet.core.kv.disk_pool`,
`quintet.core.kv.peer_pool` and `quintet.core.kv.store_pool` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from quintet.core.kv.host_pool import HostPool

PATIENCE_NS = 10_000_000_000
"""A fetch of which, and of those before it, nothing is heard for so long is given up: somebody hangs, or an answer was lost."""
MOST_NS = 60_000_000_000
"""A fetch that takes longer is given up, however much is heard of it: who brings a block now and then keeps nobody."""


@dataclass(slots=True)
class FetchRequest:
    """What a waiting request has asked for, once it was looked up: perhaps nothing."""

    num_tokens: int = 0
    """Behind so many it can begin when all has come."""
    pending: set[bytes] = field(default_factory=set)
    last: int = 0
    """The number of the newest fetch among these."""
    deadline_ns: int | None = None
    """When it is given up; None: soon known."""
    last_deadline_ns: int | None = None
    """No deadline is later; None: soon known."""


class Prefetches:
    """Who wants what, and what of it is on its way."""

    __slots__ = ("_awaited", "_num_asked", "_number_of", "_untimed", "room", "wishes")

    def __init__(self, first_host_block: int, num_host_blocks: int) -> None:
        """Host blocks: those that contents are fetched into, consecutive numbers."""
        self.room = HostPool(num_host_blocks, first_host_block)
        self.wishes: dict[int, FetchRequest] = {}
        """By request."""
        self._awaited: dict[int, bytes] = {}
        """Host block -> the content that is being read into it."""
        self._num_asked = 0
        self._number_of: dict[int, int] = {}
        """Host block -> the number of the fetch that it is for; fetches are answered in this order, or nearly."""
        self._untimed: list[FetchRequest] = []
        """Whose patience begins with the next orders."""

    def ask(
        self, request_id: int, keys: Sequence[bytes], num_tokens: int, *, whole: bool
    ) -> list[tuple[int, bytes]] | None:
        """Have a request wish for these contents: as many of the first as there is room for; ``whole``: or none.

        Return the host blocks, and contents, that are to be ordered; None, and there is no wish, without room.
        """
        wanted = self.room.want(request_id, keys, whole=whole)
        if not wanted:
            return None
        new: list[tuple[int, bytes]] = []
        for key in wanted:
            if key not in self.room.block_of:
                block = self.room.place(key)
                self._awaited[block] = key
                self._num_asked += 1
                self._number_of[block] = self._num_asked
                new.append((block, key))
        pending = {key for key in wanted if self.room.block_of[key] in self._awaited}
        last = max((self._number_of[self.room.block_of[key]] for key in pending), default=0)
        self.wishes[request_id] = wish = FetchRequest(num_tokens, pending, last)
        self._untimed.append(wish)
        return new

    def wish_nothing(self, request_id: int) -> None:
        """Note that a request was looked up, and that there is nothing for it."""
        self.wishes[request_id] = FetchRequest()

    def fetch(self, request_id: int, keys: Sequence[bytes]) -> list[int] | None:
        """See `quintet.core.kv.tiers.Tier.fetch`."""
        wish = self.wishes.get(request_id)
        if wish is None:
            return []
        if wish.pending:
            return None
        blocks = self.room.fetch(request_id, keys)
        return list(takewhile(lambda block: block not in self._awaited, blocks))

    def forget(self, request_id: int) -> None:
        """See `quintet.core.kv.tiers.Tier.forget`."""
        self.wishes.pop(request_id, None)
        self.room.forget(request_id)

    def begin_orders(self, now_ns: int) -> None:
        """Let patience begin with orders that are made now, between two plans: what was left since the last one is free."""
        self.free_left()
        for wish in self._untimed:
            if wish.last_deadline_ns is None:
                wish.last_deadline_ns = now_ns + MOST_NS
            wish.deadline_ns = min(now_ns + PATIENCE_NS, wish.last_deadline_ns)
        self._untimed.clear()

    def expire(self, now_ns: int) -> bool:
        """Give up what was fetched for too long: who waits for it computes. Return whether anything was."""
        is_late = False
        for request_id, wish in self.wishes.items():
            if wish.pending and wish.deadline_ns is not None and now_ns > wish.deadline_ns:
                is_late = True
                wish.pending.clear()
                self.room.forget(request_id)
        return is_late

    def settle(self, blocks: Sequence[int], *, missed: bool) -> list[bytes]:
        """Hear that these host blocks hold what was ordered, or do not. Return the contents, of those that were awaited."""
        newest = max((self._number_of.get(block, 0) for block in blocks), default=0)
        if newest:
            behind = [wish for wish in self.wishes.values() if wish.pending and wish.last >= newest]
            for wish in behind:
                wish.deadline_ns = None
            self._untimed += behind
        settled: list[bytes] = []
        known: list[bytes] = []
        for block in blocks:
            key = self._awaited.pop(block, None)
            if key is None:
                continue
            settled.append(key)
            del self._number_of[block]
            if self.room.block_of.get(key) == block:  # else nobody wants it any more, or it was ordered anew
                known.append(key)
        if missed:
            self.room.lose(known)
        for wish in self.wishes.values():
            if wish.pending:
                wish.pending.difference_update(known)
        return settled

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for what is on its way."""
        return any(wish.pending for wish in self.wishes.values())

    @property
    def frees_room(self) -> bool:
        """Whether there will be more room: somebody enters behind what takes it, or has just done so."""
        return bool(self.room.keys_of) or any(block not in self._awaited for block in self.room.leaving)

    def free_left(self) -> None:
        """Free what the plan that is being sent has read, and nobody writes."""
        leaving = self.room.leaving
        self.room.free += (block for block in leaving if block not in self._awaited)
        self.room.leaving = [block for block in leaving if block in self._awaited]

    def check(self, waiting: set[int]) -> None:
        """See `quintet.core.kv.tiers.Tier.check`."""
        self.room.check(waiting)
        assert self._awaited.keys() == self._number_of.keys(), (self._awaited, self._number_of)
        assert self._awaited.keys() <= {*self.room.block_of.values(), *self.room.leaving}, self._awaited
        assert waiting.issuperset(self.wishes), (waiting, list(self.wishes))
        for wish in self.wishes.values():
            assert wish.pending <= self.room.block_of.keys(), "waits for what nobody brings"
