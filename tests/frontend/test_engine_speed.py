"""Relative speed of engines, estimated from their time to first token."""

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

INVALID = (0.0, -1.0, math.nan, math.inf, -math.inf)


def play(
    slownesses: list[float],
    num_requests: int = 2000,
    seed: int = 0,
    noise: float = 0.3,
    *,
    sorted_by_size: bool = False,
) -> list[float]:
    """Run requests of many sizes; return the estimated slowness of each engine, averaged over the second half.

    ``sorted_by_size``: every other engine has short requests only.
    """
    rng, typical = random.Random(seed), LinearFit()
    paces, seen = [EngineSpeeds(typical) for _ in slownesses], [0.0] * len(slownesses)
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


def test_equal_engines_are_equal_for_any_request_sizes() -> None:
    for seed in range(5):
        for sorted_by_size in (False, True):
            assert play([1.0] * 8, seed=seed, sorted_by_size=sorted_by_size) == pytest.approx(
                [1.0] * 8, rel=1e-9
            )


@pytest.mark.parametrize("slow", [2.0, 4.0])
def test_slow_engine_is_detected(slow: float) -> None:
    for seed in range(5):
        seen = play([1.0, 1.0, 1.0, slow, 1.0, 1.0, slow, 1.0], seed=seed)
        fast = [seen[at] for at in (0, 1, 2, 4, 5, 7)]
        assert min(seen[3], seen[6]) > 0.6 * slow * max(fast), seen
        assert max(seen[3], seen[6]) < 1.4 * slow * min(fast), seen


def test_slow_one_of_two_engines_is_detected() -> None:
    for seed in range(5):
        fast, slow = play([1.0, 2.0], seed=seed)
        assert slow / fast > 1.3


def test_new_or_idle_engine_has_no_measurement() -> None:
    typical = LinearFit()
    fast, slow, new = EngineSpeeds(typical), EngineSpeeds(typical), EngineSpeeds(typical)
    for at in range(400):
        fast.note(100, 0.1, 0.01 * at)
        slow.note(100, 0.4, 0.01 * at)
    assert slow.slowness(4.0) > 1.4 and new.slowness(4.0) == 1.0
    assert slow.slowness(4.0 + MEASUREMENT_TTL_S) == 1.0
    slow.note(100, 0.1, 5.0 + MEASUREMENT_TTL_S)
    assert slow.slowness(5.0 + MEASUREMENT_TTL_S) == 1.0, "old measurements are dropped"
    for at in range(100):
        fast.note(100, 0.1, 70.0 + 0.01 * at)
        slow.note(100, 0.4, 70.0 + 0.01 * at)
    assert slow.slowness(71.0) > 1.4
    slow.forget()
    assert slow.slowness(71.0) == 1.0


def test_invalid_times_are_ignored() -> None:
    typical = LinearFit()
    pace, other = EngineSpeeds(typical), EngineSpeeds(typical)
    for at in range(400):
        for invalid in INVALID:
            pace.note(100, invalid, 0.01 * at)
        pace.note(0, 5.0, 0.01 * at)
        pace.note(-7, 5.0, 0.01 * at)
        pace.note(100, 0.1, 0.01 * at)
        other.note(100, 0.1, 0.01 * at)
    assert pace.slowness(4.0) == other.slowness(4.0) == 1.0
    assert typical.expected_s(100) == pytest.approx(0.1)


def test_one_hung_request_is_an_outlier() -> None:
    typical = LinearFit()
    pace = EngineSpeeds(typical)
    for at in range(200):
        pace.note(100, 0.1, 0.01 * at)
    pace.note(100, 1e9, 2.0)
    assert pace.slowness(2.0) == 1.0 and typical.expected_s(100) < 0.1 * MAX_OUTLIER


def test_estimate_is_monotonic_in_work() -> None:
    typical = LinearFit()
    for at in range(
        300
    ):  # the more work, the earlier the first token: as if the fast engines had the long requests
        typical.note(100 + at, 1.0 - 0.002 * at)
    assert 0 <= typical.expected_s(1) <= typical.expected_s(100) <= typical.expected_s(10_000)
