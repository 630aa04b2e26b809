"""Placement of expert copies: properties that hold for every placement and load."""

from __future__ import annotations

import itertools
import random

import pytest

from quintet.executor.distributed.parallel.placement import (
    MIN_GAIN,
    Spares,
    busiest,
    copies_between,
    homes_of,
    placed,
)

SIZES = [(8, 2, 1), (13, 3, 2), (64, 4, 2), (128, 8, 2), (256, 8, 4)]
"""Experts, ranks, copies per rank."""


def no_copies(ranks: int, places: int) -> Spares:
    """Return empty spare slots."""
    return ((None,) * places,) * ranks


def zipf(rng: random.Random, experts: int, power: float) -> list[float]:
    loads = [1000.0 / (rank + 1) ** power for rank in range(experts)]
    rng.shuffle(loads)
    return loads


def drawn(seed: int) -> tuple[list[float], list[int], Spares]:
    """Return random loads, homes and existing copies."""
    rng = random.Random(seed)
    experts, ranks, places = rng.choice(SIZES)
    homes = homes_of(experts, ranks)
    others = ([e for e in range(experts) if homes[e] != rank] for rank in range(ranks))
    spares = tuple(
        tuple(expert if rng.random() < 0.7 else None for expert in rng.sample(its, places)) for its in others
    )
    loads = zipf(rng, experts, rng.choice([0.0, 0.5, 1.0, 2.0]))
    if rng.random() < 0.2:
        loads = [load if rng.random() < 0.5 else 0.0 for load in loads]
    return loads, homes, spares


@pytest.mark.parametrize("seed", range(80))
def test_a_placement_is_valid_and_no_worse_and_stable(seed: int) -> None:
    loads, homes, spares = drawn(seed)
    found = placed(loads, homes, spares)
    assert [len(places) for places in found] == [len(places) for places in spares]
    for rank, places in enumerate(found):
        there = [expert for expert in places if expert is not None]
        assert len(set(there)) == len(there), "an expert has two copies on one rank"
        assert all(homes[expert] != rank for expert in there), "an expert has a copy on its home rank"
    mean = sum(loads) / len(spares)
    assert mean <= busiest(loads, homes, found) + 1e-6
    assert busiest(loads, homes, found) <= busiest(loads, homes, spares) + MIN_GAIN * mean + 1e-6
    assert placed(loads, homes, spares) == found, "placement must be deterministic"
    soon = placed(loads, homes, found)
    assert placed(loads, homes, soon) == soon, "repeating the placement must move nothing"
    initial = placed(loads, homes, no_copies(len(spares), len(spares[0])))
    assert placed(loads, homes, initial) == initial
    for copy in copies_between(spares, found, homes):
        assert homes[copy.expert] == copy.source != copy.target


@pytest.mark.parametrize("seed", range(8))
def test_no_placement_of_one_copy_is_better(seed: int) -> None:
    """Two ranks, one copy each: compare with all possible placements."""
    rng = random.Random(seed)
    loads, homes = zipf(rng, 8, 1.2), homes_of(8, 2)
    least = min(
        busiest(loads, homes, ((left,), (right,)))
        for left, right in itertools.product((None, 4, 5, 6, 7), (None, 0, 1, 2, 3))
    )
    assert busiest(loads, homes, placed(loads, homes, no_copies(2, 1))) <= least + MIN_GAIN * sum(loads) / 2


def test_the_load_of_one_hot_expert_is_divided_evenly() -> None:
    homes = homes_of(8, 4)
    loads = [70.0, 0.0, 10.0, 0.0, 0.0, 10.0, 10.0, 0.0]
    found = placed(loads, homes, no_copies(4, 1))
    assert [its[0] for its in found[1:]] == [0, 0, 0]
    assert busiest(loads, homes, no_copies(4, 1)) == 70.0
    assert busiest(loads, homes, found) == pytest.approx(25.0)


def test_unneeded_copies_hold_the_hottest_experts() -> None:
    """Average loads are even and copies are empty: one step may need one rank's experts more. Nearly as hot experts remain."""
    homes, loads = homes_of(8, 2), [4.0, 3.0, 2.0, 1.0, 4.0, 3.0, 2.0, 1.0]
    found = placed(loads, homes, no_copies(2, 2))
    assert found == ((4, 5), (0, 1))
    loads[1], loads[2] = loads[2], loads[1]
    assert placed(loads, homes, found) == found
    loads[1], loads[2], loads[3] = 0.5, 3.5, 2.0
    assert placed(loads, homes, found) == ((4, 5), (0, 2))


def test_few_experts_move_when_loads_change_a_little() -> None:
    rng = random.Random(3)
    loads, homes = zipf(rng, 64, 1.0), homes_of(64, 4)
    now = placed(loads, homes, no_copies(4, 3))
    for _ in range(20):
        loads = [load * rng.uniform(0.95, 1.05) for load in loads]
        new = placed(loads, homes, now)
        assert len(copies_between(now, new, homes)) <= 2
        now = new
