"""Which of many servers are worth comparing for a request, so that a choice among a thousand looks at a few of them.

`quintet.frontend.router.choose` compares all that it is given. What it minimizes is what a server has to do less what it has of
the prompt; so of the servers that know a prompt equally far only the one with the least to do can be chosen, and of those that
know nothing of it as well. Servers are kept in order of what they have to do, and who knows a prompt is asked of `Holders`.

Where other routers send to the same servers, what is known of those is a poll old, and all who go by it would choose the same
few. So then the servers that are compared besides those that know the prompt are drawn by chance (Mitzenmacher, How useful is old
information?, 2000): docs/scale.md has what that changes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from random import Random

FEW = 16
"""So many servers that know a prompt equally far are all compared; of more, those with the least to do."""
EQUALS = 4
"""So many of those that have the least to do are compared: who is equal takes turns."""


class Shortlist:
    """The servers that get requests, by what they have to do."""

    def __init__(self, load_of: Callable[[int], float | None], rng: Random) -> None:
        """``load_of`` an index: what the server has to do, None for one that gets nothing."""
        self._load_of = load_of
        self._rng = rng
        self._order: list[tuple[float, int]] = []
        self._placed: dict[int, float] = {}
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
        self, known: Sequence[tuple[int, Collection[int]]], without: Collection[int], turn: int
    ) -> dict[int, int]:
        """Return the few servers among which the best is, with how many pieces of the prompt each has.

        ``known``: how many pieces who has, those that have most first (`Holders.of`).
        """
        self.settle()
        found: dict[int, int] = {}
        for num_pieces, indexes in known:
            if len(indexes) <= FEW:
                several = [i for i in indexes if i in self._placed and i not in without]
            else:
                several = list(
                    islice((i for _, i in self._order if i in indexes and i not in without), EQUALS)
                )
            for index in several:
                found.setdefault(index, num_pieces)
        others = self._drawn(without) if self.draws else islice(self._least(without, turn), EQUALS)
        for index in others:
            found.setdefault(index, next((n for n, indexes in known if index in indexes), 0))
        return found

    def _drawn(self, without: Collection[int]) -> list[int]:
        order = [each for each in self._order if each[1] not in without] if without else self._order
        return [index for _, index in self._rng.sample(order, min(EQUALS, len(order)))]

    def _least(self, without: Collection[int], turn: int) -> Iterator[int]:
        """Yield servers from the one with the least to do; of those that are equal in that, another one first each turn."""
        order = self._order
        num_equal = bisect_right(order, (order[0][0], math.inf)) if order else 0
        first = turn - turn % EQUALS  # of so many `choose` takes each in its turn
        for place in range(len(order)):
            at = (place + first) % num_equal if place < num_equal else place
            if order[at][1] not in without:
                yield order[at][1]

    def settle(self) -> None:
        """Bring the order up to what has changed."""
        if not self._changed:
            return
        order, placed = self._order, self._placed
        if len(self._changed) > len(placed) // 8:
            for index in self._changed:
                self._note(index)
            self._order = sorted((load, index) for index, load in placed.items())
        else:
            for index in self._changed:
                if index in placed:
                    del order[bisect_left(order, (placed[index], index))]
                if self._note(index):
                    insort(order, (placed[index], index))
        self._changed.clear()

    def _note(self, index: int) -> bool:
        load = self._load_of(index)
        self.num_moves += (load is None) == (index in self._placed)
        if load is None:
            self._placed.pop(index, None)
            return False
        self._placed[index] = load
        return True
