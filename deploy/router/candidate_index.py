"""Index of candidate servers by load, so that a choice among a thousand servers compares only a few.

`quintet.frontend.load_balancing.load_balancer.choose` compares all its candidates. It minimizes a server's load minus
its cached part of the prompt. So among servers of one kind with the same cached prefix, only the least loaded one can be
chosen. A kind is a speed and a full or not full prefix cache; there are few speeds
(`quintet.frontend.load_balancing.engine_speed`). Servers of each kind are sorted by load. `Holders` finds the servers
with a prompt's prefix.

If other routers use the same servers, the known load is one poll old, and all routers would choose the same few servers.
Then the candidates without the prefix are sampled at random (Mitzenmacher, How useful is old information?, 2000).
docs/scale.md has measurements.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice
from random import Random

FEW = 16
"""Servers with the same cached prefix that are all compared; of more, only the least loaded."""
EQUALS = 4
"""Least loaded servers that are compared; equally loaded ones take turns."""
Kind = tuple[float, bool]
"""Slowness of a server, and whether its prefix cache is full."""
Load = tuple[Kind, int]
"""Kind and load of a server."""
Order = list[tuple[int, int]]
"""Load and index of servers, sorted by load."""


def _any(index: int, num_pieces: int) -> bool:
    return True


class CandidateIndex:
    """Index of the usable servers, sorted by load."""

    def __init__(self, load_of: Callable[[int], Load | None], rng: Random) -> None:
        """``load_of`` maps a server's index to its kind and load, or to None if it gets no requests."""
        self._load_of = load_of
        self._rng = rng
        self._orders: dict[Kind, Order] = {}
        """Sorted servers of each kind."""
        self._placed: dict[int, Load] = {}
        self._changed: set[int] = set()
        self.num_moves = 0
        """Number of changes of a server between usable and unusable."""
        self.is_sampling = False
        """Sample servers at random, because other clients use them too."""

    def change(self, index: int) -> None:
        self._changed.add(index)

    def usable_indexes(self) -> list[int]:
        """Return the indexes of all usable servers."""
        self.settle()
        return sorted(self._placed)

    def candidates(
        self,
        known: Sequence[tuple[int, Collection[int]]],
        without: Collection[int],
        turn: int,
        fits: Callable[[int, int], bool] = _any,
    ) -> dict[int, int]:
        """Return the candidate servers, with the number of cached pieces of the prompt.

        ``known``: pairs of a number of cached pieces and the servers that have them, longest prefix first (`Holders.of`).
        ``fits``: whether the KV memory of a server with that many cached pieces has space for the request.
        """
        self.settle()
        found: dict[int, int] = {}
        for num_pieces, indexes in known:
            if len(indexes) <= FEW:
                several = [i for i in indexes if i in self._placed and i not in without]
            else:
                several = []
                for order in self._orders.values():
                    few = (i for _, i in order if i in indexes and i not in without and fits(i, num_pieces))
                    several += islice(few, EQUALS)
            for index in several:
                if fits(index, num_pieces):
                    found.setdefault(index, num_pieces)

        def pieces_of(index: int) -> int:
            return next((n for n, indexes in known if index in indexes), 0)

        for index in self._others(without, turn, lambda index: fits(index, pieces_of(index))):
            found.setdefault(index, pieces_of(index))
        return found

    def _others(
        self, without: Collection[int], turn: int, fits: Callable[[int], bool]
    ) -> Iterator[int] | list[int]:
        """Return the candidates independent of the cached prefix."""
        if self.is_sampling:
            return self._sampled(without, fits)
        orders = self._orders.values()
        return chain.from_iterable(
            islice(filter(fits, _least(order, without, turn)), EQUALS) for order in orders
        )

    def _sampled(self, without: Collection[int], fits: Callable[[int], bool]) -> list[int]:
        left = [index for order in self._orders.values() for _, index in order if index not in without]
        drawn = self._rng.sample(left, min(EQUALS, len(left)))
        fitting = list(filter(fits, drawn))
        if fitting:
            return fitting
        left = list(filter(fits, left))
        return self._rng.sample(left, min(EQUALS, len(left)))

    def settle(self) -> None:
        """Apply the pending changes to the sorted orders."""
        if not self._changed:
            return
        placed = self._placed
        if len(self._changed) > len(placed) // 8:
            for index in self._changed:
                self._update(index)
            self._orders = {}
            for index, (kind, load) in placed.items():
                self._orders.setdefault(kind, []).append((load, index))
            for order in self._orders.values():
                order.sort()
        else:
            for index in self._changed:
                if index in placed:
                    self._take_out(index)
                if self._update(index):
                    kind, load = placed[index]
                    insort(self._orders.setdefault(kind, []), (load, index))
        self._changed.clear()

    def _take_out(self, index: int) -> None:
        kind, load = self._placed[index]
        order = self._orders[kind]
        del order[bisect_left(order, (load, index))]
        if not order:
            del self._orders[kind]

    def _update(self, index: int) -> bool:
        load = self._load_of(index)
        self.num_moves += (load is None) == (index in self._placed)
        if load is None:
            self._placed.pop(index, None)
            return False
        self._placed[index] = load
        return True


def _least(order: Order, without: Collection[int], turn: int) -> Iterator[int]:
    """Yield servers by increasing load; equally loaded servers rotate with ``turn``."""
    num_equal = bisect_right(order, (order[0][0], math.inf)) if order else 0
    first = turn - turn % EQUALS  # `choose` rotates among this many candidates
    for place in range(len(order)):
        at = (place + first) % num_equal if place < num_equal else place
        if order[at][1] not in without:
            yield order[at][1]
