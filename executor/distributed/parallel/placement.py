"""Placement of redundant experts: choose the copies in each rank's spare slots from measured loads.

    homes    rank 0: 0 1 2 3    rank 1: 4 5 6 7      fixed: the checkpoint's experts
    spares   rank 0: 6 .        rank 1: 1 .          copies; either rank may compute rows of experts 1 and 6

Redundant experts that follow measured loads: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.4.1. There
all experts are rearranged; here only the copies are. Each step divides an expert's rows among its ranks by the step's
own counts (``csrc/cpu/ranks/expert_shares.hpp``), so few copies balance much. Pure functions: equal inputs give equal
placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.executor.model_config.share import Share

Spares = tuple[tuple[int | None, ...], ...]
"""Copied expert by rank and slot; None for an empty slot."""

MIN_MOVED = 0.01
"""Minimum load that a copy must take over, as a fraction of a rank's mean load."""
MIN_GAIN = 0.03
"""Minimum reduction of the busiest rank's load, as a fraction of the mean, to change the placement."""
MIN_REPLACEMENT_FACTOR = 2.0
"""Factor by which an expert's value must exceed that of a copy without balancing effect to replace it."""
KEEP_FRACTION = 0.9
"""An existing copy is kept if it takes over at least this fraction of the best new copy's load."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of an expert to be made."""

    expert: int
    source: int
    """The expert's home rank."""
    target: int
    place: int
    """Spare slot of the target rank; its content is replaced."""


def homes_of(experts: int, ranks: int) -> list[int]:
    """Return the home rank of each expert."""
    kept = (Share(rank, ranks).of(experts) for rank in range(ranks))
    return [rank for rank, its in enumerate(kept) for _ in range(its.count)]


def busiest(loads: Sequence[float], homes: Sequence[int], spares: Spares) -> float:
    """Return the busiest rank's load, with copied experts divided optimally."""
    levels = _Balance(loads, homes, len(spares))
    for rank, experts in enumerate(spares):
        for expert in experts:
            if expert is not None:
                levels.copy(expert, rank)
    for _ in range(2 * len(spares)):
        levels.settle()
    return max(levels.of_rank)


def placed(loads: Sequence[float], homes: Sequence[int], spares: Spares) -> Spares:
    """Return the new content of the spare slots; unchanged if no placement gains more than `MIN_GAIN`.

    loads: of each expert, in any unit; homes: see `homes_of`.
    """
    ranks, mean = len(spares), sum(loads) / len(spares)
    levels = _Balance(loads, homes, ranks)
    free = [len(places) for places in spares]
    wanted: list[list[int]] = [[] for _ in spares]
    while (found := levels.best_copy(free, spares, MIN_MOVED * mean)) is not None:
        expert, rank = found
        levels.copy(expert, rank)
        levels.settle()
        wanted[rank].append(expert)
        free[rank] -= 1
    level = tuple(_laid_out(its, existing) for its, existing in zip(wanted, spares, strict=True))
    gain = busiest(loads, homes, spares) - busiest(loads, homes, level)
    return _filled(loads, homes, level if gain > MIN_GAIN * mean else spares, wanted)


def _filled(
    loads: Sequence[float], homes: Sequence[int], spares: Spares, wanted: Sequence[Sequence[int]]
) -> Spares:
    """Fill slots without balancing effect with hot experts, because a step's loads differ from the average.

    An expert's value is its load divided by its number of ranks. Chosen copies stay; other copies stay unless an
    expert is worth `MIN_REPLACEMENT_FACTOR` times as much.
    """
    held = [{expert for expert in its if expert is not None} for its in spares]
    holders = [1 + sum(expert in its for its in held) for expert in range(len(loads))]
    filled = [list(its) for its in spares]
    for rank, its in enumerate(filled):
        for place, existing in enumerate(its):
            if existing is not None and existing in wanted[rank]:
                continue
            others = (e for e in range(len(loads)) if homes[e] != rank and e not in held[rank])
            best = max(others, key=lambda e: (loads[e] / (holders[e] + 1), -e), default=None)
            worth = 0.0 if existing is None else loads[existing] / holders[existing]
            if best is None or loads[best] / (holders[best] + 1) <= MIN_REPLACEMENT_FACTOR * worth:
                continue
            if existing is not None:
                held[rank].remove(existing)
                holders[existing] -= 1
            held[rank].add(best)
            holders[best] += 1
            its[place] = best
    return tuple(map(tuple, filled))


def copies_between(before: Spares, after: Spares, homes: Sequence[int]) -> list[Copy]:
    """Return the copies to make, rank by rank."""
    return [
        Copy(expert, homes[expert], rank, place)
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
        for place, expert in enumerate(new)
        if expert is not None and expert != old[place]
    ]


def _laid_out(wanted: Sequence[int], existing: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return a rank's slots with the chosen experts: existing copies keep their slots; new ones fill empty slots first."""
    left = [expert for expert in wanted if expert not in existing]
    places = list(existing)
    for place in sorted(range(len(places)), key=lambda place: existing[place] is not None):
        if left and places[place] not in wanted:
            places[place] = left.pop(0)
    return tuple(places)


class _Balance:
    """Loads of ranks, and the division of each copied expert's load between its ranks.

    Computed by water-filling: repeatedly divide one expert's load over its ranks, least loaded first. Each division
    lowers the sum of squares, and its minimum also minimizes the maximum.
    """

    def __init__(self, loads: Sequence[float], homes: Sequence[int], ranks: int) -> None:
        self._loads = loads
        self._parts: list[dict[int, float]] = [{} for _ in range(ranks)]
        """Load per expert, for each rank."""
        self._holders: dict[int, list[int]] = {}
        """Ranks of each copied expert."""
        self._homes = homes
        for expert, (load, home) in enumerate(zip(loads, homes, strict=True)):
            self._parts[home][expert] = load
        self.of_rank = [sum(parts.values()) for parts in self._parts]

    def copy(self, expert: int, rank: int) -> None:
        """Add a rank to an expert's ranks."""
        self._holders.setdefault(expert, [self._homes[expert]]).append(rank)
        self._divide(expert)

    def settle(self) -> None:
        """Divide the loads of all copied experts again, largest first."""
        for expert in sorted(self._holders, key=lambda expert: (-self._loads[expert], expert)):
            self._divide(expert)

    def _divide(self, expert: int) -> None:
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
        """Return the expert to copy from the busiest rank, and its target: the least loaded rank with a free slot.

        None if no copy takes over more than ``least``. free: empty slots of each rank.
        """
        most = max(range(len(free)), key=lambda rank: (self.of_rank[rank], -rank))
        for rank in sorted(range(len(free)), key=lambda rank: (self.of_rank[rank], rank)):
            spare_load = (self.of_rank[most] - self.of_rank[rank]) / 2
            if not free[rank] or spare_load <= least:
                continue
            moved = {
                expert: min(part, spare_load)
                for expert, part in self._parts[most].items()
                if expert not in self._parts[rank]
            }
            existing = [expert for expert in spares[rank] if expert is not None and expert in moved]
            best = _largest(moved, moved, self._loads)
            kept = _largest(existing, moved, self._loads)
            if best is not None and kept is not None and moved[kept] >= KEEP_FRACTION * moved[best]:
                best = kept
            if best is not None and moved[best] > least:
                return best, rank
        return None


def _largest(
    experts: Sequence[int] | dict[int, float], moved: dict[int, float], loads: Sequence[float]
) -> int | None:
    return max(experts, key=lambda expert: (moved[expert], loads[expert], -expert), default=None)
