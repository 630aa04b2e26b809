"""Waiting for a step: sleep, poll around the predicted end, then block. Time is the test's."""

from __future__ import annotations

import pytest

from quintet.executor.backends.cuda.step_clock import SPIN_S, StepClock, wait_until_done


class Time:
    """A clock that sleeping advances, and looking at it by a microsecond."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_the_end_of_a_queued_step_follows_that_of_the_step_before() -> None:
    time = Time()
    clock = StepClock(lambda: time.now)
    assert clock.launched(8) is None, "nothing is known of the first step of a graph"
    clock.ended(8, 5.0)
    assert clock.launched(8) == pytest.approx(100.005)
    assert clock.launched(8) == pytest.approx(100.010)
    time.now = 200.0
    assert clock.launched(8) == pytest.approx(200.005)


def test_a_step_without_a_graph_is_not_predicted() -> None:
    clock = StepClock()
    clock.ended(None, 5.0)
    assert clock.launched(None) is None


def test_a_predicted_end_is_polled_without_blocking() -> None:
    time = Time()
    end = 100.005

    def block() -> None:
        raise AssertionError("blocked although the event was done")

    wait_until_done(lambda: time.now >= end, block, end, time.clock, time.sleep)
    assert time.slept[0] == pytest.approx(0.005 - SPIN_S, abs=1e-5)
    assert end <= time.now < end + 1e-5


def test_a_step_that_takes_longer_than_predicted_blocks() -> None:
    time, blocked = Time(), []
    wait_until_done(lambda: False, lambda: blocked.append(time.now), 100.001, time.clock, time.sleep)
    assert blocked and blocked[0] == pytest.approx(100.001 + SPIN_S, abs=1e-5)


def test_an_unpredicted_step_blocks_at_once() -> None:
    time, blocked = Time(), []
    wait_until_done(lambda: False, lambda: blocked.append(True), None, time.clock, time.sleep)
    assert blocked == [True] and not time.slept
