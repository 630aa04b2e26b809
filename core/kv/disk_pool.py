"""Blocks on disk: contents that outlive the device, the executor and the server, and the way back to the device.

A place is always in exactly one of three states:

      free ──── order ───▶ being written ──── stored ───▶ holds a content
       ▲                        │ not stored                   │ another is to be stored, or this one was missed
       └────────────────────────┴──────────────────────────────┘

Every full block that becomes findable on the device is stored, unless it is there already; what was used longest ago gives
way. What a waiting request wants is fetched into host blocks, and is *pending* until the executor has answered; the plan that
lets the request enter copies it to the device. A host block that is being written gets no other content before the answer is
here, whoever wanted it.

Never wrong: a key names the content, and the executor reads nothing else under it (`quintet.executor.disk.block_file`). What is
believed to be there and is not is a miss: the request computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from quintet.core.kv.host_pool import HostPool
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_disk import KvAnswers, KvOrders

PATIENCE_NS = 10_000_000_000
"""A fetch of which, and of those before it, nothing is heard for so long is given up: the disk hangs, or an answer was lost."""
MOST_SURPRISE = 8
"""A fetch counts as no more than so many times the mean: one that was stopped says nothing of the next."""
TRY_EVERY = 32
"""After so many requests for which computing looked cheaper, what was measured is forgotten: the disk may be faster now."""


@dataclass(slots=True)
class Wish:
    """What a waiting request has asked for, once it was looked up: perhaps nothing."""

    num_tokens: int = 0
    """Behind so many it can begin when all has come."""
    pending: set[bytes] = field(default_factory=set)
    last: int = 0
    """The number of the newest fetch among these."""
    deadline_ns: int = 0
    """When it is given up; 0: soon known."""


class DiskPool:
    """Which place holds what, and what is on its way to and fro: a `quintet.core.kv.tiers.Tier`."""

    __slots__ = (
        "_awaited",
        "_due",
        "_fetches",
        "_num_asked",
        "_num_refused",
        "_number_of",
        "_untimed",
        "copy_ns",
        "free",
        "num_places",
        "place_of",
        "room",
        "storing",
        "wishes",
    )

    def __init__(self, num_places: int, first_host_block: int, num_host_blocks: int) -> None:
        """Host blocks: those that contents are fetched into, consecutive numbers."""
        self.num_places = num_places
        self.free = dict.fromkeys(range(num_places - 1, -1, -1))
        self.place_of: dict[bytes, int] = {}
        """Content -> where it is, used longest ago first."""
        self.storing: dict[bytes, int] = {}
        """Content -> the place that it is being written to."""
        self.room = HostPool(num_host_blocks, first_host_block)
        self.wishes: dict[int, Wish] = {}
        """By request."""
        self.copy_ns: float | None = None
        """How long fetching a block takes, as measured; None before any was."""
        self._due: dict[bytes, int] = {}
        """Content -> the device block to store it from, of what was not ordered yet."""
        self._fetches: list[tuple[int, int, bytes]] = []
        """Place, host block and content, of what was not ordered yet."""
        self._awaited: dict[int, bytes] = {}
        """Host block -> the content that is being read into it."""
        self._num_asked = 0
        self._number_of: dict[int, int] = {}
        """Host block -> the number of the fetch that it is for; fetches are answered in this order."""
        self._untimed: list[Wish] = []
        """Whose patience begins with the next orders."""
        self._num_refused = 0

    # --- keeping ---

    def hold(self, key: bytes, place: int) -> None:
        """Hear what a place holds from before."""
        if place in self.free and key not in self.place_of:
            del self.free[place]
            self.place_of[key] = place

    def stand(self, key: bytes, block: int) -> None:
        """Hear that a full block has just become findable; the plan that writes it comes before the next orders."""
        if key not in self.place_of and key not in self.storing:
            self._due[key] = block

    def leave(self, key: bytes, block: int) -> None:
        """See `Tier.leave`: what is not ordered by now is not stored."""
        self._due.pop(key, None)

    def use(self, keys: Sequence[bytes]) -> None:
        """Have these contents, in the order of their tokens, give way last; the tail, worth nothing alone, before the head."""
        for key in reversed(keys):
            place = self.place_of.pop(key, None)
            if place is not None:
                self.place_of[key] = place

    def _take_place(self) -> int | None:
        if self.free:
            return self.free.popitem()[0]
        if not self.place_of:
            return None
        return self.place_of.pop(next(iter(self.place_of)))

    # --- fetching ---

    def ask(self, request_id: int, keys: Sequence[bytes], num_tokens: int, *, whole: bool) -> bool:
        """Fetch these contents, which are on disk, for a request: as many of the first as there is room for; ``whole``: or none.

        Return whether any is fetched.
        """
        wanted = self.room.want(request_id, keys, whole=whole)
        if not wanted:
            return False
        for key in wanted:
            if key not in self.room.block_of:
                block = self.room.place(key)
                self._awaited[block] = key
                self._num_asked += 1
                self._number_of[block] = self._num_asked
                self._fetches.append((self.place_of[key], block, key))
        pending = {key for key in wanted if self.room.block_of[key] in self._awaited}
        last = max((self._number_of[self.room.block_of[key]] for key in pending), default=0)
        self.wishes[request_id] = wish = Wish(num_tokens, pending, last)
        self._untimed.append(wish)
        return True

    def is_cheaper(self, num_blocks: int, computing_ns: int | None) -> bool:
        """Return whether fetching so many blocks takes less than computing does. What was not measured does."""
        if computing_ns is None or self.copy_ns is None or num_blocks * self.copy_ns < computing_ns:
            return True
        self._num_refused += 1
        if self._num_refused % TRY_EVERY == 0:
            self.copy_ns = None
        return self.copy_ns is None

    def fetch(self, request_id: int, keys: Sequence[bytes]) -> list[int] | None:
        """See `Tier.fetch`."""
        wish = self.wishes.get(request_id)
        if wish is None:
            return []
        if wish.pending:
            return None
        blocks = self.room.fetch(request_id, keys)
        return list(takewhile(lambda block: block not in self._awaited, blocks))

    def forget(self, request_id: int) -> None:
        """See `Tier.forget`."""
        self.wishes.pop(request_id, None)
        self.room.forget(request_id)

    def expire(self, now_ns: int) -> None:
        """Give up what was fetched for too long: who waits for it computes."""
        for request_id, wish in self.wishes.items():
            if wish.pending and wish.deadline_ns and now_ns > wish.deadline_ns:
                wish.pending.clear()
                self.room.forget(request_id)

    # --- orders and answers ---

    @property
    def due(self) -> Mapping[bytes, int]:
        """Contents that are to be stored and were not ordered yet, and the device blocks that hold them."""
        return self._due

    def take_orders(self, tables: int, now_ns: int) -> KvOrders | None:
        """Return what is to be done, if anything: before the next plan is made."""
        for wish in self._untimed:
            wish.deadline_ns = now_ns + PATIENCE_NS
        self._untimed.clear()
        if not self._due and not self._fetches:
            return None
        orders, stores = KvOrders(tables), list[int]()
        for key, block in self._due.items():
            place = self._take_place()
            if place is None:
                break
            self.storing[key] = place
            stores += (block, place)
            orders.store_keys.append(key)
        orders.stores = pack_i32(stores)
        orders.fetches = pack_i32([number for place, block, _ in self._fetches for number in (place, block)])
        orders.fetch_keys += (key for _, _, key in self._fetches)
        self._due.clear()
        self._fetches.clear()
        return orders

    def answer(self, answers: KvAnswers) -> None:
        """Apply what became of orders."""
        for key in answers.stored:
            place = self.storing.pop(key, None)
            if place is not None:
                self.place_of[key] = place
        for key in answers.unstored:
            place = self.storing.pop(key, None)
            if place is not None:
                self.free[place] = None
        fetched = unpack_i32(answers.fetched)
        self._settle(fetched, missed=False)
        self._settle(unpack_i32(answers.missed), missed=True)
        if fetched:
            copy_ns = answers.fetch_ns / len(fetched)
            old_ns = copy_ns if self.copy_ns is None else self.copy_ns
            self.copy_ns = (3 * old_ns + min(copy_ns, MOST_SURPRISE * old_ns)) / 4

    def _settle(self, blocks: Sequence[int], *, missed: bool) -> None:
        newest = max((self._number_of.get(block, 0) for block in blocks), default=0)
        if newest:
            behind = [wish for wish in self.wishes.values() if wish.pending and wish.last >= newest]
            for wish in behind:
                wish.deadline_ns = 0
            self._untimed += behind
        for block in blocks:
            key = self._awaited.pop(block, None)
            if key is None:
                continue
            del self._number_of[block]
            if missed and key in self.place_of:
                self.free[self.place_of.pop(key)] = None
            if self.room.block_of.get(key) != block:
                continue  # nobody wants it any more, or it was ordered anew
            if missed:
                self.room.lose(key)
            for wish in self.wishes.values():
                wish.pending.discard(key)

    def take_copies(self) -> list[int]:
        """See `Tier.take_copies`: nothing is copied this way. What that plan has read, and nobody writes, is free again."""
        leaving = self.room.leaving
        self.room.free += (block for block in leaving if block not in self._awaited)
        self.room.leaving = [block for block in leaving if block in self._awaited]
        return []

    def check(self, waiting: set[int]) -> None:
        """See `Tier.check`."""
        places = [*self.free, *self.place_of.values(), *self.storing.values()]
        assert sorted(places) == list(range(self.num_places)), len(places)
        assert self.place_of.keys().isdisjoint(self.storing), "stored twice"
        self.room.check(waiting)
        assert self._awaited.keys() == self._number_of.keys(), (self._awaited, self._number_of)
        assert self._awaited.keys() <= {*self.room.block_of.values(), *self.room.leaving}, self._awaited
        assert waiting.issuperset(self.wishes), (waiting, list(self.wishes))
        for wish in self.wishes.values():
            assert wish.pending <= self.room.block_of.keys(), "waits for what nobody brings"
