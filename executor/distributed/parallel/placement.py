"""Which experts ranks should have copies of: from what was asked of each expert to what lies in the spare places of each rank.

    homes    rank 0: 0 1 2 3    rank 1: 4 5 6 7      never move: what a checkpoint is read into
    spares   rank 0: 6 .        rank 1: 1 .          copies; rows of 1 and of 6 may be computed by either rank

Redundant experts that follow measured loads: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.4.1. There all experts
are arranged anew; here only copies are, and each step divides an expert's rows among those who have it as its own counts say
(``csrc/cpu/expert_shares.hpp``), so few copies level much. Pure: knows no memory and no clock. Equal inputs, equal placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.executor.model_config.share import Share

Spares = tuple[tuple[int | None, ...], ...]
"""By rank and place: the expert that is copied there, or None."""

LEAST_MOVED = 0.01
"""Of a rank's mean load: a copy that takes over less is not worth its place."""
LEAST_GAIN = 0.03
"""Of the same: if the busiest rank has not that much less to do, nothing is moved."""
MUCH_MORE = 2.0
"""Times: an expert that is worth so much more replaces one whose copy levels nothing."""
KEPT_IF = 0.9
"""A copy that is there is as good as one that would take over more, if it takes over this much of that."""


@dataclass(frozen=True, slots=True)
class Copy:
    """An expert that is to be copied."""

    expert: int
    source: int
    """The rank where it is at home."""
    target: int
    place: int
    """Which of the target's spare places; whatever is there goes."""


def homes_of(experts: int, ranks: int) -> list[int]:
    """Return at which rank each expert is at home."""
    kept = (Share(rank, ranks).of(experts) for rank in range(ranks))
    return [rank for rank, its in enumerate(kept) for _ in range(its.count)]


def no_copies(ranks: int, places: int) -> Spares:
    """Return spare places without anything in them."""
    return ((None,) * places,) * ranks


def busiest(loads: Sequence[float], homes: Sequence[int], spares: Spares) -> float:
    """Return the load of the busiest rank, experts that several have divided as well as can be."""
    levels = _Levels(loads, homes, len(spares))
    for rank, experts in enumerate(spares):
        for expert in experts:
            if expert is not None:
                levels.copy(expert, rank)
    for _ in range(2 * len(spares)):
        levels.settle()
    return max(levels.of_rank)


def placed(loads: Sequence[float], homes: Sequence[int], spares: Spares) -> Spares:
    """Return what should lie in the spare places; what lies there now, if nothing better by `LEAST_GAIN` was found.

    loads: of each expert, in whatever unit; homes: see `homes_of`.
    """
    ranks, mean = len(spares), sum(loads) / len(spares)
    levels = _Levels(loads, homes, ranks)
    free = [len(places) for places in spares]
    wanted: list[list[int]] = [[] for _ in spares]
    while (found := levels.best_copy(free, spares, LEAST_MOVED * mean)) is not None:
        expert, rank = found
        levels.copy(expert, rank)
        levels.settle()
        wanted[rank].append(expert)
        free[rank] -= 1
    level = tuple(_laid_out(its, there) for its, there in zip(wanted, spares, strict=True))
    gain = busiest(loads, homes, spares) - busiest(loads, homes, level)
    return _filled(loads, homes, level if gain > LEAST_GAIN * mean else spares, wanted)


def _filled(
    loads: Sequence[float], homes: Sequence[int], spares: Spares, wanted: Sequence[Sequence[int]]
) -> Spares:
    """Return the places with hot experts in those that level nothing: what a step asks for is not what steps ask for on average.

    An expert is worth its load over how many have it. What is wanted stays, and what is there if nothing is worth much more.
    """
    held = [{expert for expert in its if expert is not None} for its in spares]
    holders = [1 + sum(expert in its for its in held) for expert in range(len(loads))]
    filled = [list(its) for its in spares]
    for rank, its in enumerate(filled):
        for place, there in enumerate(its):
            if there is not None and there in wanted[rank]:
                continue
            others = (e for e in range(len(loads)) if homes[e] != rank and e not in held[rank])
            best = max(others, key=lambda e: (loads[e] / (holders[e] + 1), -e), default=None)
            worth = 0.0 if there is None else loads[there] / holders[there]
            if best is None or loads[best] / (holders[best] + 1) <= MUCH_MORE * worth:
                continue
            if there is not None:
                held[rank].remove(there)
                holders[there] -= 1
            held[rank].add(best)
            holders[best] += 1
            its[place] = best
    return tuple(map(tuple, filled))


def copies_between(before: Spares, after: Spares, homes: Sequence[int]) -> list[Copy]:
    """Return what has to be copied where, rank by rank."""
    return [
        Copy(expert, homes[expert], rank, place)
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
        for place, expert in enumerate(new)
        if expert is not None and expert != old[place]
    ]


def _laid_out(wanted: Sequence[int], there: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return a rank's places with what is wanted: what is there stays, the rest goes over what is not, empty places first."""
    left = [expert for expert in wanted if expert not in there]
    places = list(there)
    for place in sorted(range(len(places)), key=lambda place: there[place] is not None):
        if left and places[place] not in wanted:
            places[place] = left.pop(0)
    return tuple(places)


class _Levels:
    """The load of each rank, and how much of each expert's every rank has that has it.

    Levels are found by pouring one expert's load after another over those who have it, the least busy first, again and again:
    that makes the sum of squares less each time, and where it is least, so is the maximum.
    """

    def __init__(self, loads: Sequence[float], homes: Sequence[int], ranks: int) -> None:
        self._loads = loads
        self._parts: list[dict[int, float]] = [{} for _ in range(ranks)]
        """Of each rank: by expert, the load that it has of it."""
        self._holders: dict[int, list[int]] = {}
        """By expert who has it, of those that several have."""
        self._homes = homes
        for expert, (load, home) in enumerate(zip(loads, homes, strict=True)):
            self._parts[home][expert] = load
        self.of_rank = [sum(parts.values()) for parts in self._parts]

    def copy(self, expert: int, rank: int) -> None:
        """Let a rank have an expert besides those who have it."""
        self._holders.setdefault(expert, [self._homes[expert]]).append(rank)
        self._pour(expert)

    def settle(self) -> None:
        """Pour all that several have anew, the largest first."""
        for expert in sorted(self._holders, key=lambda expert: (-self._loads[expert], expert)):
            self._pour(expert)

    def _pour(self, expert: int) -> None:
        holders, levels = self._holders[expert], self.of_rank
        for rank in holders:
            levels[rank] -= self._parts[rank].get(expert, 0.0)
        holders = sorted(holders, key=lambda rank: (levels[rank], rank))
        left, surface = self._loads[expert], levels[holders[0]]
        for count in range(1, len(holders) + 1):
            following = levels[holders[count]] if count < len(holders) else float("inf")
            rise = min(following - surface, left / count)
            surface, left = surface + rise, left - rise * count
            if left <= 0:
                break
        for rank in holders:
            part = max(0.0, surface - levels[rank])
            self._parts[rank][expert] = part
            levels[rank] += part

    def best_copy(self, free: Sequence[int], spares: Spares, least: float) -> tuple[int, int] | None:
        """Return the expert whose copy takes most off the busiest rank, and where it goes: to the least busy rank that has room.

        None if no copy takes off ``least``. free: places of each rank.
        """
        most = max(range(len(free)), key=lambda rank: (self.of_rank[rank], -rank))
        for rank in sorted(range(len(free)), key=lambda rank: (self.of_rank[rank], rank)):
            room = (self.of_rank[most] - self.of_rank[rank]) / 2
            if not free[rank] or room <= least:
                continue
            moved = {
                expert: min(part, room)
                for expert, part in self._parts[most].items()
                if expert not in self._parts[rank]
            }
            there = [expert for expert in spares[rank] if expert is not None and expert in moved]
            best = _largest(moved, moved, self._loads)
            kept = _largest(there, moved, self._loads)
            if best is not None and kept is not None and moved[kept] >= KEPT_IF * moved[best]:
                best = kept
            if best is not None and moved[best] > least:
                return best, rank
        return None


def _largest(
    experts: Sequence[int] | dict[int, float], moved: dict[int, float], loads: Sequence[float]
) -> int | None:
    return max(experts, key=lambda expert: (moved[expert], loads[expert], -expert), default=None)
