"""`StepClock`: sleep, poll around the predicted end, then block. The test controls the clock."""

from __future__ import annotations

import pytest

from quintet.executor.backends.cuda.step_clock import SPIN_S, StepClock, wait_until_done


class FakeClock:
    """A fake clock: sleeping advances it, and each reading advances it by a microsecond."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_queued_step_is_predicted_from_the_end_of_the_previous_step() -> None:
    time = FakeClock()
    clock = StepClock(lambda: time.now)
    assert clock.launched(8) is None, "no prediction for the first step of a graph"
    clock.ended(8, 5.0)
    assert clock.launched(8) == pytest.approx(100.005)
    assert clock.launched(8) == pytest.approx(100.010)
    time.now = 200.0
    assert clock.launched(8) == pytest.approx(200.005)


def test_step_without_a_graph_is_not_predicted() -> None:
    clock = StepClock()
    clock.ended(None, 5.0)
    assert clock.launched(None) is None


def test_predicted_end_is_polled_without_blocking() -> None:
    time = FakeClock()
    end = 100.005

    def block() -> None:
        raise AssertionError("blocked although the event was done")

    wait_until_done(lambda: time.now >= end, block, end, time.clock, time.sleep)
    assert time.slept[0] == pytest.approx(0.005 - SPIN_S, abs=1e-5)
    assert end <= time.now < end + 1e-5


def test_step_longer_than_predicted_blocks() -> None:
    time, blocked = FakeClock(), []
    wait_until_done(lambda: False, lambda: blocked.append(time.now), 100.001, time.clock, time.sleep)
    assert blocked and blocked[0] == pytest.approx(100.001 + SPIN_S, abs=1e-5)


def test_unpredicted_step_blocks_immediately() -> None:
    time, blocked = FakeClock(), []
    wait_until_done(lambda: False, lambda: blocked.append(True), None, time.clock, time.sleep)
    assert blocked == [True] and not time.slept
