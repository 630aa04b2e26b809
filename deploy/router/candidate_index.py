"""Which of many servers are worth comparing for a request, so that a choice among a thousand looks at a few of them.

`quintet.frontend.load_balancing.load_balancer.choose` compares all that it is given. What it minimizes is what a
server has to do less what it has of the prompt; so of the servers that know a prompt equally far, and are of one kind
(equally fast, and both with memory that is full of beginnings, or neither), only the one with the least to do can be
chosen, and of those that know nothing of it as well. Servers are kept in order of what they have to do, each kind by
itself (there are few paces: `quintet.frontend.load_balancing.engine_speed`), and who knows a prompt is asked of
`Holders`.

Where other routers send to the same servers, what is known of those is a poll old, and all who go by it would choose the same
few. So then the servers that are compared besides those that know the prompt are drawn by chance (Mitzenmacher, How useful is old
information?, 2000): docs/scale.md has what that changes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice
from random import Random

FEW = 16
"""So many servers that know a prompt equally far are all compared; of more, those with the least to do."""
EQUALS = 4
"""So many of those that have the least to do are compared: who is equal takes turns."""
Kind = tuple[float, bool]
"""How slow a server is, and whether its memory is full of beginnings."""
Load = tuple[Kind, int]
"""What a server is, and what it has to do."""
Order = list[tuple[int, int]]
"""What each of several servers has to do, the least first, and its index."""


def _any(index: int, num_pieces: int) -> bool:
    return True


class CandidateIndex:
    """The servers that get requests, by what they have to do."""

    def __init__(self, load_of: Callable[[int], Load | None], rng: Random) -> None:
        """``load_of`` an index: what the server has to do, None for one that gets nothing."""
        self._load_of = load_of
        self._rng = rng
        self._orders: dict[Kind, Order] = {}
        """Of each kind of servers that there is."""
        self._placed: dict[int, Load] = {}
        self._changed: set[int] = set()
        self.num_moves = 0
        """How often a server began to get requests, or ceased to."""
        self.draws = False
        """Whether servers are drawn by chance, because others send there too."""

    def change(self, index: int) -> None:
        """What this server has to do may be another now."""
        self._changed.add(index)

    def everybody(self) -> list[int]:
        """Return all servers that get requests, by index."""
        self.settle()
        return sorted(self._placed)

    def candidates(
        self,
        known: Sequence[tuple[int, Collection[int]]],
        without: Collection[int],
        turn: int,
        fits: Callable[[int, int], bool] = _any,
    ) -> dict[int, int]:
        """Return the few servers among which the best is, with how many pieces of the prompt each has.

        ``known``: how many pieces who has, those that have most first (`Holders.of`). ``fits``: whether a server that has so many
        pieces of the prompt has room for it.
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
        """Return who is compared whatever it knows of the prompt."""
        if self.draws:
            return self._drawn(without, fits)
        orders = self._orders.values()
        return chain.from_iterable(
            islice(filter(fits, _least(order, without, turn)), EQUALS) for order in orders
        )

    def _drawn(self, without: Collection[int], fits: Callable[[int], bool]) -> list[int]:
        left = [index for order in self._orders.values() for _, index in order if index not in without]
        drawn = self._rng.sample(left, min(EQUALS, len(left)))
        fitting = list(filter(fits, drawn))
        if fitting:
            return fitting
        left = list(filter(fits, left))
        return self._rng.sample(left, min(EQUALS, len(left)))

    def settle(self) -> None:
        """Bring the orders up to what has changed."""
        if not self._changed:
            return
        placed = self._placed
        if len(self._changed) > len(placed) // 8:
            for index in self._changed:
                self._note(index)
            self._orders = {}
            for index, (kind, load) in placed.items():
                self._orders.setdefault(kind, []).append((load, index))
            for order in self._orders.values():
                order.sort()
        else:
            for index in self._changed:
                if index in placed:
                    self._take_out(index)
                if self._note(index):
                    kind, load = placed[index]
                    insort(self._orders.setdefault(kind, []), (load, index))
        self._changed.clear()

    def _take_out(self, index: int) -> None:
        kind, load = self._placed[index]
        order = self._orders[kind]
        del order[bisect_left(order, (load, index))]
        if not order:
            del self._orders[kind]

    def _note(self, index: int) -> bool:
        load = self._load_of(index)
        self.num_moves += (load is None) == (index in self._placed)
        if load is None:
            self._placed.pop(index, None)
            return False
        self._placed[index] = load
        return True


def _least(order: Order, without: Collection[int], turn: int) -> Iterator[int]:
    """Yield servers from the one with the least to do; of those that are equal in that, another one first each turn."""
    num_equal = bisect_right(order, (order[0][0], math.inf)) if order else 0
    first = turn - turn % EQUALS  # of so many `choose` takes each in its turn
    for place in range(len(order)):
        at = (place + first) % num_equal if place < num_equal else place
        if order[at][1] not in without:
            yield order[at][1]
