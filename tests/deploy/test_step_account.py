"""Account of a step: sums, shares, and time hidden by the model."""

from __future__ import annotations

import pytest

from quintet.deploy.tools.step_account import Bar, ProcessPart, Step, account, steps_of
from quintet.wire.errors import ConfigError

MS = 1_000_000


def executor(name: str, step: int, begin_ms: int, end_ms: int) -> Bar:
    return Bar(begin_ms * MS, end_ms * MS, "executor-0", name, step)


def two_steps() -> list[Bar]:
    """Two steps of 10 ms: 1 ms of tables, 8 ms of layers, 1 ms of waiting for the next."""
    bars = []
    for step in (4, 5, 6):
        at = 10 * step
        bars += [
            executor("wait", step, at - 1, at),
            executor("tables", step, at, at + 1),
            executor("layers", step, at + 1, at + 9),
        ]
    return bars


def test_steps_run_from_start_to_start() -> None:
    assert steps_of(two_steps()) == [Step(4, 40 * MS, 50 * MS), Step(5, 50 * MS, 60 * MS)]


def test_a_gap_in_the_numbers_is_no_step() -> None:
    bars = [bar for bar in two_steps() if bar.number != 5]
    assert steps_of(bars) == []


def test_concurrent_and_blocking_spans_are_separate() -> None:
    bars = two_steps()
    bars += [
        Bar(42 * MS, 44 * MS, "core-0", "plan", 5),  # concurrent with step 4
        Bar(48 * MS, 50 * MS, "core-0", "commit", 3),  # half of it after step 4
        Bar(57 * MS, 59 * MS, "core-0", "plan", 6),
        Bar(61 * MS, 63 * MS, "core-0", "plan", 7),  # after the steps: not counted
    ]
    taken = account(sorted(bars), steps_of(bars))
    assert (taken.num_steps, taken.step_ms) == (2, 10.0)
    rows = {(row.role, row.name): row for row in taken.rows}
    assert rows["executor", "layers"].ms == 8.0
    assert rows["executor", "layers"].share == 0.8
    assert (rows["core", "plan"].ms, rows["core", "plan"].hidden) == (2.0, 1.0)
    assert (rows["core", "commit"].ms, rows["core", "commit"].hidden) == (1.0, 0.5)


def test_several_spans_of_a_name_in_a_step_count_together() -> None:
    bars = two_steps()
    for step in (4, 5):
        bars += [
            Bar(at * MS, (at + 1) * MS, "frontend-0", "events", 1) for at in (10 * step + 2, 10 * step + 5)
        ]
    rows = {(row.role, row.name): row for row in account(sorted(bars), steps_of(bars)).rows}
    assert rows["frontend", "events"].ms == 2.0


def in_stages() -> list[Bar]:
    """Four steps of 10 ms: each stage computes for 4 ms of them, the second after the first."""
    bars = []
    for step in (4, 5, 6, 7, 8):
        at = 10 * step
        bars += [
            executor("bubble", step - 2, at - 5, at - 1),
            executor("sampling", step - 2, at - 1, at),
            executor("wait", step, at, at),
            executor("layers", step, at, at + 4),
            Bar((at + 4) * MS, (at + 8) * MS, "executor-0 stage 1", "layers", step - 3),
            Bar((at + 8) * MS, (at + 9) * MS, "executor-0 stage 1", "bubble", step - 3),
            Bar((at + 9) * MS, (at + 14) * MS, "executor-0 stage 1", "wait", step - 2),
        ]
    return sorted(bars)


def test_stages_report_compute_and_wait_time() -> None:
    """From the start of the first step to the end of the last; spans beyond that are not counted."""
    bars = in_stages()
    taken = account(bars, steps_of(bars))
    assert (taken.num_steps, taken.all_s) == (4, 0.04)
    assert taken.parts == [
        ProcessPart("executor-0", pytest.approx(0.5), pytest.approx(0.4)),  # a tenth is unattributed
        ProcessPart("executor-0 stage 1", pytest.approx(0.4), pytest.approx(0.5)),  # of the last wait 1 ms
    ]
    rows = {(row.role, row.name): row for row in taken.rows}
    assert (rows["stage 1", "layers"].ms, rows["stage 1", "layers"].hidden) == (4.0, 0.0)
    assert taken.text().splitlines()[-1].split() == ["executor-0", "stage", "1", "40.0%", "50.0%"]


def test_an_executor_of_one_process_has_no_bubble() -> None:
    bars = two_steps()
    assert account(bars, steps_of(bars)).parts == []


def test_an_account_of_no_steps_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="send requests to the server"):
        account([], [])
