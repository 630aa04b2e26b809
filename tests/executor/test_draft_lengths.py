"""The number of drafts that pays, from measured step times and acceptance."""

from __future__ import annotations

import numpy as np
import pytest

from quintet.executor.speculation.lengths import TRIAL_EVERY, DraftLengths, StepTime

MOST = 8


def lengths_of(shares: list[float], base: float, each: float) -> DraftLengths:
    """Return lengths after many drafts of one slot per share, and steps with these costs."""
    lengths = DraftLengths(len(shares))
    for slot, share in enumerate(shares):
        lengths.begin(slot)
        rng = np.random.default_rng(slot)
        for _ in range(400):
            lengths.note(slot, int(rng.random() < share), 1)
    for num_tokens in range(1, 60):
        lengths.time.note(num_tokens, base + each * num_tokens)
    return lengths


def chosen(lengths: DraftLengths, num_slots: int, draft_time: tuple[float, float] = (0.0, 0.0)) -> list[int]:
    slots = np.arange(num_slots, dtype=np.int32)
    return lengths.choose(slots, np.full(num_slots, MOST), num_slots, num_slots, draft_time).tolist()


def test_fit_finds_base_and_time_per_token() -> None:
    time = StepTime()
    for num_tokens in (1, 5, 2, 9, 1, 4):
        time.note(num_tokens, 0.01 + 0.002 * num_tokens)
    assert time.fit() == pytest.approx((0.01, 0.002))


def test_useful_drafts_are_many_and_useless_ones_none() -> None:
    many, none = chosen(lengths_of([0.99, 0.02], base=0.01, each=0.001), 2)
    assert many == MOST and none == 0


def test_no_drafts_where_tokens_cost_as_much_as_steps() -> None:
    assert chosen(lengths_of([0.7], base=0.0, each=0.001), 1) == [0]


def test_drafts_of_a_small_batch_are_longer_than_of_a_large_one() -> None:
    lengths = lengths_of([0.8] * 32, base=0.01, each=0.001)
    assert chosen(lengths, 1)[0] > chosen(lengths, 32)[0]


def test_forced_drafts_pay_where_the_drafter_fails() -> None:
    lengths = lengths_of([0.02], base=0.01, each=0.001)
    slots, most = np.zeros(1, np.int32), np.full(1, MOST)
    assert lengths.choose(slots, most, 1, 1, num_forced=np.array([5])).tolist() == [5]
    lengths.note(0, 4, 5, num_forced=5)
    assert lengths.choose(slots, most, 1, 1, num_forced=np.array([5])).tolist() == [5]
    assert chosen(lengths, 1) == [0]  # their acceptance says nothing about the drafter


def test_rejected_forced_drafts_are_no_longer_proposed() -> None:
    lengths = lengths_of([0.02], base=0.001, each=0.001)
    for _ in range(50):
        lengths.note(0, 0, 5, num_forced=5)
    assert lengths.choose(
        np.zeros(1, np.int32), np.full(1, MOST), 1, 1, num_forced=np.array([5])
    ).tolist() == [0]


def test_request_without_useful_drafts_tries_one_sometimes() -> None:
    lengths = lengths_of([0.02], base=0.001, each=0.001)
    found = [chosen(lengths, 1)[0] for _ in range(3 * TRIAL_EVERY)]
    assert found.count(1) == 3 and set(found) == {0, 1}


def test_costly_drafts_are_fewer_and_too_costly_ones_none() -> None:
    lengths = lengths_of([0.8], base=0.01, each=0.0005)
    free, cheap, costly = (chosen(lengths, 1, (seconds, 0.0))[0] for seconds in (0.0, 0.002, 0.02))
    assert free > cheap > 1 and costly == 0


def test_number_of_drafts_with_a_cost_has_the_highest_throughput() -> None:
    share, base, each, draft_base, draft_each = 0.85, 0.01, 0.0004, 0.001, 0.0002
    lengths = lengths_of([share], base, each)

    def rate(count: int) -> float:
        tokens = sum(share**depth for depth in range(count + 1))
        return tokens / (base + each * (1 + count) + (draft_base + draft_each) * count)

    share = float(lengths._accepted[0, 0] / lengths._weights[0, 0])
    assert chosen(lengths, 1, (draft_base, draft_each)) == [max(range(MOST + 1), key=rate)]


def test_trials_take_a_small_share_of_the_time() -> None:
    lengths = lengths_of([0.02], base=0.001, each=0.001)
    num_trials = 0
    for _ in range(4000):
        is_trial = chosen(lengths, 1, (0.002, 0.0)) == [1]
        num_trials += is_trial
        lengths.note_step(0.01 + 0.02 * is_trial, 0.02 * is_trial)
    assert 0 < num_trials * 0.02 < 0.013 * 4000 * 0.01


def test_new_request_starts_with_the_acceptance_of_earlier_ones() -> None:
    lengths = lengths_of([0.02], base=0.01, each=0.001)
    lengths.begin(0)
    assert chosen(lengths, 1) == [0]
