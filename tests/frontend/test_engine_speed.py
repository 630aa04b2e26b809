"""How slow an engine is beside others, learnt from when its requests began."""

from __future__ import annotations

import math
import random

import pytest

from quintet.frontend.load_balancing.engine_speed import (
    MAX_OUTLIER,
    MEASUREMENT_TTL_S,
    EngineSpeeds,
    LinearFit,
)

ABSURD = (0.0, -1.0, math.nan, math.inf, -math.inf)


def play(
    slownesses: list[float],
    num_requests: int = 2000,
    seed: int = 0,
    noise: float = 0.3,
    *,
    sorted_by_size: bool = False,
) -> list[float]:
    """Have engines begin requests of many sizes; return how slow each seems, on average over the second half.

    ``sorted_by_size``: whether every other engine has short ones alone.
    """
    rng, usual = random.Random(seed), LinearFit()
    paces, seen = [EngineSpeeds(usual) for _ in slownesses], [0.0] * len(slownesses)
    for at in range(num_requests):
        index = rng.randrange(len(paces))
        is_long = index % 2 if sorted_by_size else rng.random() < 0.5
        work = round(rng.lognormvariate(7, 1)) if is_long else rng.randrange(16, 200)
        took_s = slownesses[index] * (0.01 + 50e-6 * work) * rng.lognormvariate(0, noise)
        paces[index].note(work, took_s, 0.01 * at)
        if at >= num_requests // 2:
            for number, pace in enumerate(paces):
                seen[number] += pace.slowness(0.01 * at) / (num_requests - num_requests // 2)
    return seen


def test_engines_that_are_equal_are_equal_whatever_they_had_to_do() -> None:
    for seed in range(5):
        for sorted_by_size in (False, True):
            assert play([1.0] * 8, seed=seed, sorted_by_size=sorted_by_size) == pytest.approx(
                [1.0] * 8, rel=1e-9
            )


@pytest.mark.parametrize("slow", [2.0, 4.0])
def test_an_engine_that_takes_longer_is_found_out(slow: float) -> None:
    for seed in range(5):
        seen = play([1.0, 1.0, 1.0, slow, 1.0, 1.0, slow, 1.0], seed=seed)
        fast = [seen[at] for at in (0, 1, 2, 4, 5, 7)]
        assert min(seen[3], seen[6]) > 0.6 * slow * max(fast), seen
        assert max(seen[3], seen[6]) < 1.4 * slow * min(fast), seen


def test_of_two_engines_the_slow_one_is_told_from_the_other() -> None:
    for seed in range(5):
        fast, slow = play([1.0, 2.0], seed=seed)
        assert slow / fast > 1.3


def test_nothing_is_known_of_an_engine_that_is_new_or_was_not_asked_for_long() -> None:
    usual = LinearFit()
    fast, slow, new = EngineSpeeds(usual), EngineSpeeds(usual), EngineSpeeds(usual)
    for at in range(400):
        fast.note(100, 0.1, 0.01 * at)
        slow.note(100, 0.4, 0.01 * at)
    assert slow.slowness(4.0) > 1.4 and new.slowness(4.0) == 1.0
    assert slow.slowness(4.0 + MEASUREMENT_TTL_S) == 1.0
    slow.note(100, 0.1, 5.0 + MEASUREMENT_TTL_S)
    assert slow.slowness(5.0 + MEASUREMENT_TTL_S) == 1.0, "what it once was counts for nothing"
    for at in range(100):
        fast.note(100, 0.1, 70.0 + 0.01 * at)
        slow.note(100, 0.4, 70.0 + 0.01 * at)
    assert slow.slowness(71.0) > 1.4
    slow.forget()
    assert slow.slowness(71.0) == 1.0


def test_times_that_cannot_be_change_nothing() -> None:
    usual = LinearFit()
    pace, other = EngineSpeeds(usual), EngineSpeeds(usual)
    for at in range(400):
        for absurd in ABSURD:
            pace.note(100, absurd, 0.01 * at)
        pace.note(0, 5.0, 0.01 * at)
        pace.note(-7, 5.0, 0.01 * at)
        pace.note(100, 0.1, 0.01 * at)
        other.note(100, 0.1, 0.01 * at)
    assert pace.slowness(4.0) == other.slowness(4.0) == 1.0
    assert usual.took_s == pytest.approx(0.1)


def test_a_request_that_hung_says_little_of_the_next() -> None:
    usual = LinearFit()
    pace = EngineSpeeds(usual)
    for at in range(200):
        pace.note(100, 0.1, 0.01 * at)
    pace.note(100, 1e9, 2.0)
    assert pace.slowness(2.0) == 1.0 and usual.took_s < 0.1 * MAX_OUTLIER


def test_more_work_never_takes_less() -> None:
    usual = LinearFit()
    for at in range(
        300
    ):  # the more there was, the sooner it began: as where those with much to do are the fast ones
        usual.note(100 + at, 1.0 - 0.002 * at)
    assert 0 <= usual.expected_s(1) <= usual.expected_s(100) <= usual.expected_s(10_000)
