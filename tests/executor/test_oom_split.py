"""When memory runs out, a step's parts together say what the step would have said."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tests.executor.conftest import Drawer, new_row

from quintet.executor.oom_split import OomSplit
from quintet.wire.codec import pack_i32, pack_u8, unpack_i32
from quintet.wire.params import SamplingParams
from quintet.wire.step import PromptLogprobs, StepPlan, StepResult, TokenLogprobs

ROWS = [(3, 0, 1), (7, 10, 1), (2, 5, 9), (5, 0, 4), (1, 8, 3)]
"""Slot, start, count."""
SAMPLES = [1, 1, 0, 1, 1]


def plan_of_rows(rows: list[tuple[int, int, int]], samples: list[int]) -> StepPlan:
    slots, starts, counts = zip(*rows, strict=True)
    return StepPlan(
        step=9,
        sent_ns=0,
        freed=pack_i32([4]),
        new_rows=[new_row(3, Drawer(SamplingParams()))],
        blocks=pack_i32([3, 0, 0, 1]),
        copies=pack_i32([1, 2]),
        slots=pack_i32(slots),
        starts=pack_i32(starts),
        counts=pack_i32(counts),
        samples=pack_u8(samples),
        checksum=77,
        swaps_out=pack_i32([6, 0]),
        swaps_in=pack_i32([7, 1]),
    )


@dataclass
class SmallDevice:
    """Computes at most so many tokens at a time. What it says of a row and position depends on nothing else."""

    max_tokens: int
    computed: list[tuple[int, int]] = field(default_factory=list)
    """(slot, position), in order."""
    num_releases: int = 0
    num_deltas: int = 0

    def release(self) -> None:
        self.num_releases += 1

    def compute(self, plan: StepPlan) -> StepResult:
        slots, starts, counts = (
            np.frombuffer(column, np.int32).tolist() for column in (plan.slots, plan.starts, plan.counts)
        )
        if sum(counts) > self.max_tokens:
            raise torch.OutOfMemoryError("tried to allocate\ntoo much")
        self.num_deltas += any(
            (plan.freed, plan.new_rows, plan.blocks, plan.copies, plan.swaps_out, plan.swaps_in)
        )
        result = StepResult(plan.step, 0, b"")
        for index, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
            positions = range(start, start + count)
            self.computed += [(slot, position) for position in positions]
            if plan.samples[index]:
                token = pack_i32([100 * slot + start + count])
                result.token_ids += token
                result.logprobs.append(TokenLogprobs(index, 1, token, token))
            if slot in (2, 5):
                column = pack_i32([1000 * slot + position for position in positions])
                result.prompt_logprobs.append(PromptLogprobs(index, start + 1, 1, column, column, column))
        return result


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 9, 17])
def test_the_parts_say_what_the_whole_says(max_tokens: int) -> None:
    plan = plan_of_rows(ROWS, SAMPLES)
    whole, small = SmallDevice(1000), SmallDevice(max_tokens)
    expected = OomSplit(whole.release).compute(plan, whole.compute)
    smaller = OomSplit(small.release)
    assert smaller.compute(plan, small.compute) == expected
    assert small.computed == whole.computed, "each token once, in order"
    assert small.num_deltas == 1, "deltas once, with the first part that fits"
    assert smaller.num_split == 1, "steps are counted, not cuts"
    assert small.num_releases > 0


def test_a_step_that_fits_is_left_alone() -> None:
    plan, device = plan_of_rows(ROWS, SAMPLES), SmallDevice(18)
    smaller = OomSplit(device.release)
    assert len(unpack_i32(smaller.compute(plan, device.compute).token_ids)) == 4
    assert (smaller.num_split, device.num_releases) == (0, 0)


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    plan, device = plan_of_rows(ROWS, SAMPLES), SmallDevice(4)
    smaller = OomSplit(device.release)
    for _ in range(3):
        smaller.compute(plan, device.compute)
    assert smaller.num_split == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tried to allocate too much" in caplog.text


def test_when_not_even_a_token_fits_the_error_goes_on() -> None:
    device = SmallDevice(0)
    smaller = OomSplit(device.release)
    with pytest.raises(torch.OutOfMemoryError):
        smaller.compute(plan_of_rows(ROWS, SAMPLES), device.compute)
    with pytest.raises(torch.OutOfMemoryError):
        smaller.compute(plan_of_rows([(0, 3, 1)], [1]), device.compute)


@dataclass
class WithStates(SmallDevice):
    """Its states are written over as it computes: what was begun with states of its own may not begin once more."""

    begun: set[int] = field(default_factory=set)
    """Slots that a step ran out of memory with."""
    went_on: list[int] = field(default_factory=list)

    def compute(self, plan: StepPlan) -> StepResult:
        slots, starts = (np.frombuffer(column, np.int32).tolist() for column in (plan.slots, plan.starts))
        lost = {slot for slot, start in zip(slots, starts, strict=True) if start}
        assert not lost & self.begun, "a state was written over, and is gone on from"
        try:
            return super().compute(plan)
        except torch.OutOfMemoryError:
            self.begun |= lost
            raise

    def continue_states(self, slot: int) -> bytes:
        self.went_on.append(slot)
        return pack_i32([slot, 0, 0, 5])


def test_a_step_that_states_were_written_in_fails_and_later_ones_are_cut_before() -> None:
    plan, device, whole = plan_of_rows(ROWS, SAMPLES), WithStates(4), SmallDevice(1000)
    smaller = OomSplit(device.release, device.continue_states)
    failures = 0
    while True:
        device.begun.clear()  # after a failure all is computed again
        device.computed.clear()
        try:
            result = smaller.compute(plan, device.compute)
            break
        except torch.OutOfMemoryError:
            failures += 1
    assert result == whole.compute(plan)
    assert device.computed == whole.computed
    assert failures == 2, "18 tokens were too many, and then 9"
    assert smaller.num_split == 2
    assert set(device.went_on) == {2}, "the only row of more than 4 tokens"


def test_a_step_that_begins_its_requests_is_computed_once_more() -> None:
    plan = plan_of_rows([(3, 0, 7), (7, 0, 1), (2, 0, 9)], [1, 1, 1])
    device, whole = WithStates(5), SmallDevice(1000)
    smaller = OomSplit(device.release, device.continue_states)
    assert smaller.compute(plan, device.compute) == whole.compute(plan)
    device.max_tokens = 17
    device.computed.clear()
    assert smaller.compute(plan, device.compute) == whole.compute(plan), "whole, as soon as there is room"
    later = plan_of_rows([(3, 7, 16)], [1])
    device.num_releases = 0
    smaller.compute(later, device.compute)
    assert device.num_releases == 0, "and so is every other one"


def test_the_rest_of_a_row_is_told_where_its_states_are() -> None:
    told: list[bytes] = []
    device = WithStates(4)

    def compute(plan: StepPlan) -> StepResult:
        result = device.compute(plan)
        told.append(plan.blocks)
        return result

    OomSplit(device.release, device.continue_states).compute(plan_of_rows([(3, 0, 8)], [1]), compute)
    assert told == [pack_i32([3, 0, 0, 1]), pack_i32([3, 0, 0, 5])]
