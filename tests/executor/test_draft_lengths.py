"""The number of drafts that pays, from measured step times and acceptance."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from quintet.executor.speculation.lengths import (
    MAX_PAUSE,
    MAX_TRIAL_EVERY,
    RECHECK_EVERY,
    TRIAL_EVERY,
    DraftCosts,
    DraftLengths,
    StepCost,
)
from quintet.executor.speculation.step_time import StepTime

MOST = 8


def lengths_of(shares: list[float], base: float, each: float) -> DraftLengths:
    """Return lengths after many drafts of one slot per share, and steps with these costs."""
    lengths = DraftLengths(len(shares))
    for slot, share in enumerate(shares):
        lengths.begin(slot)
        rng = np.random.default_rng(slot)
        for _ in range(400):
            lengths.note(slot, int(rng.random() < share), 1)
    for num_tokens in range(len(shares) + 60, len(shares) - 1, -1):
        lengths.time.note(len(shares), num_tokens, base + each * num_tokens)
    return lengths


def chosen(
    lengths: DraftLengths,
    num_slots: int,
    step_time: tuple[float, float] = (0.0, 0.0),
    num_missing: int = 0,
    num_forced: int = 0,
) -> list[int]:
    """Return the numbers of drafts of a step; empty if there is no choice in it."""
    is_due = lengths.is_due()
    lengths.begin_step()
    if not is_due:
        return []
    costs = DraftCosts(step_time, np.full(num_slots, num_missing) if any(step_time) else None)
    forced = np.full(num_slots, num_forced)
    choice = lengths.choose(np.arange(num_slots), np.full(num_slots, MOST), num_slots, costs, forced)
    return list(map(int, choice.counts))


def test_fit_finds_base_and_time_per_token() -> None:
    time = StepTime()
    for num_tokens in (1, 5, 2, 9, 1, 4):
        time.note(num_tokens, 0.01 + 0.002 * num_tokens)
    assert time.fit() == pytest.approx((0.01, 0.002))


def test_first_step_of_a_size_does_not_count() -> None:
    time = StepTime()
    for num_tokens in (1, 5, 9):
        time.note(num_tokens, 1.0)
        for _ in range(20):
            time.note(num_tokens, 0.01 + 0.002 * num_tokens)
    assert time.fit() == pytest.approx((0.01, 0.002))


def test_long_step_changes_the_fit_little() -> None:
    time = StepTime()
    for num_tokens in (9, 5, 1, 9, 5, 1, 9, 5, 1):
        time.note(num_tokens, 0.01 + 0.002 * num_tokens)
    time.note(5, 1.0)
    base, each = time.fit()
    assert base + 5 * each < 0.022


def test_time_per_token_is_remembered_over_steps_of_one_size() -> None:
    time = StepTime()
    for num_tokens in [1, 5, 9] * 10 + [1] * 200:
        time.note(num_tokens, 0.01 + 0.008 * num_tokens)
    assert time.fit() == pytest.approx((0.01, 0.008))


def test_useful_drafts_are_many_and_useless_ones_none() -> None:
    many, none = chosen(lengths_of([0.99, 0.02], base=0.01, each=0.001), 2)
    assert many > 3 and none == 0


def test_no_drafts_where_tokens_cost_as_much_as_steps() -> None:
    assert chosen(lengths_of([0.7], base=0.0, each=0.001), 1) == [0]


def test_drafts_of_a_small_batch_are_longer_than_of_a_large_one() -> None:
    lengths = lengths_of([0.8] * 32, base=0.01, each=0.001)
    assert chosen(lengths, 1)[0] > chosen(lengths, 32)[0]


def test_forced_drafts_pay_where_the_drafter_fails() -> None:
    lengths = lengths_of([0.02], base=0.01, each=0.001)
    assert chosen(lengths, 1, num_forced=5) == [5]
    lengths.note(0, 4, 5, num_forced=5)
    assert chosen(lengths, 1, num_forced=5) == [5]
    assert chosen(lengths, 1) == [0]  # their acceptance does not depend on the drafter


def test_rejected_forced_drafts_are_no_longer_proposed() -> None:
    lengths = lengths_of([0.02], base=0.001, each=0.001)
    for _ in range(50):
        lengths.note(0, 0, 5, num_forced=5)
    assert chosen(lengths, 1, num_forced=5) == [0]


def test_request_without_useful_drafts_tries_one_sometimes() -> None:
    lengths = lengths_of([0.02], base=0.01, each=0.001)
    found = [count for _ in range(10 * TRIAL_EVERY) for count in chosen(lengths, 1)]
    assert 4 <= found.count(1) <= 10 and set(found) == {0, 1}


def test_trials_become_rare_until_drafts_pay() -> None:
    lengths = lengths_of([0.02], base=0.01, each=0.001)
    steps = [step for step in range(12 * MAX_TRIAL_EVERY) if sum(chosen(lengths, 1))]
    gaps = [end - begin for begin, end in pairwise(steps)]
    assert gaps == sorted(gaps) and gaps[-1] >= MAX_TRIAL_EVERY
    for _ in range(100):
        lengths.note(0, 1, 1)
    while not sum(chosen(lengths, 1)):  # the pause between choices
        pass
    for _ in range(100):
        lengths.note(0, 0, 1)
    found = [count for _ in range(2 * TRIAL_EVERY + MAX_PAUSE) for count in chosen(lengths, 1)]
    assert 1 in found


def test_no_choice_in_most_steps_while_no_drafts_pay() -> None:
    lengths = lengths_of([0.02], base=0.01, each=0.001)
    assert sum(len(chosen(lengths, 1)) for _ in range(1000)) < 100


def test_new_request_ends_the_pause_between_choices() -> None:
    lengths = lengths_of([0.02], base=0.01, each=0.001)
    while chosen(lengths, 1):
        pass
    lengths.begin(0)
    assert chosen(lengths, 1)


def test_drafts_that_cannot_pay_are_rarely_tried() -> None:
    lengths = lengths_of([0.9], base=0.01, each=0.001)
    too_dear = 0.02, 0.0
    found = [count for _ in range(4 * RECHECK_EVERY) for count in chosen(lengths, 1, too_dear)]
    assert 2 <= found.count(1) <= 4 and set(found) == {0, 1}


@pytest.mark.parametrize(("base", "is_rare"), [(0.002, True), (0.05, False)])
def test_trials_are_rare_where_ideal_drafts_gain_little(base: float, is_rare: bool) -> None:
    """With many rows, a draft costs nearly as much as a token without drafts."""
    lengths = lengths_of([0.02] * 28, base=base, each=0.0007)
    steps = [step for step in range(4 * RECHECK_EVERY) if sum(chosen(lengths, 28))]
    assert (len(steps) <= 4) == is_rare and len(steps) >= 2


def test_costly_drafts_are_fewer_and_too_costly_ones_none() -> None:
    lengths = lengths_of([0.8], base=0.01, each=0.0005)
    free, cheap = (chosen(lengths, 1, (seconds, 0.0))[0] for seconds in (0.0, 0.002))
    assert free > cheap > 1
    assert chosen(lengths, 1, (0.02, 0.0)) == [0]


def test_number_of_drafts_with_a_cost_has_the_highest_throughput() -> None:
    share, base, each, draft_base, draft_each = 0.85, 0.01, 0.0004, 0.001, 0.0002
    lengths = lengths_of([share], base, each)

    def rate(count: int) -> float:
        tokens = sum(share**depth for depth in range(count + 1))
        return tokens / (base + each * (1 + count) + (draft_base + draft_each) * count)

    share = float(lengths.rates(np.array([0]))[0, 0])
    assert chosen(lengths, 1, (draft_base, draft_each)) == [max(range(MOST + 1), key=rate)]


def test_numbers_of_several_requests_have_the_highest_throughput_together() -> None:
    base, each, draft_base, draft_each = 0.01, 0.0016, 0.0015, 0.0002
    lengths = lengths_of([0.85, 0.5, 0.3], base, each)
    shares = lengths.rates(np.arange(3))[:, 0]

    def rate(counts: tuple[int, ...]) -> float:
        tokens = 3 + sum(
            share**depth for share, count in zip(shares, counts, strict=True) for depth in range(1, count + 1)
        )
        return tokens / (
            base + each * (3 + sum(counts)) + draft_base * max(counts) + draft_each * sum(counts)
        )

    numbers = range(MOST + 1)
    best = max(((a, b, c) for a in numbers for b in numbers for c in numbers), key=rate)
    assert chosen(lengths, 3, (draft_base, draft_each)) == list(best)


def test_missing_tokens_are_computed_only_if_the_drafts_of_a_request_pay_for_them() -> None:
    lengths, step_time = lengths_of([0.8], base=0.01, each=0.0005), (0.001, 0.0005)
    assert chosen(lengths, 1, step_time, num_missing=1000)[0] > 1
    assert chosen(lengths, 1, step_time, num_missing=10000) == [0]


def test_short_requests_do_not_pay_for_missing_tokens() -> None:
    lengths, step_time = lengths_of([0.8], base=0.01, each=0.0005), (0.001, 0.0005)
    for _ in range(20):
        lengths.end(0)
    assert chosen(lengths, 1, step_time, num_missing=1000) == [0]


def test_drafts_that_are_rarely_found_are_not_worth_a_slow_search() -> None:
    lengths = lengths_of([0.8], base=0.01, each=0.001)
    for _ in range(200):
        lengths.note_found(np.array([0]), np.array([False]))
    assert chosen(lengths, 1)[0] > 1, "a search that takes no time always pays"
    for _ in range(100):
        lengths.begin_step()
        choice = lengths.choose(np.array([0]), np.array([MOST]), 1, DraftCosts())
        lengths.note_step(np.array([0]), 1, StepCost(1, 0.011, 0.001, 0, 0), choice)
    lengths.begin(0)
    for _ in range(200):
        lengths.note_found(np.array([0]), np.array([False]))
    assert lengths.choose(np.array([0]), np.array([MOST]), 1, DraftCosts()).counts.tolist() == [0]


def test_new_request_starts_with_the_acceptance_of_earlier_ones() -> None:
    lengths = lengths_of([0.02], base=0.01, each=0.001)
    lengths.begin(0)
    assert chosen(lengths, 1) == [0]
