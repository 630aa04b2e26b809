"""Splits of a step that runs out of memory have together the result of the whole step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.executor.conftest import Drawer, new_row

from quintet.executor.oom_split import OomSplit
from quintet.wire.codec import pack_i32, pack_u8, unpack_i32
from quintet.wire.params import SamplingParams
from quintet.wire.step import PromptLogprobs, StepPlan, StepResult, TokenLogprobs

ROWS = [(3, 0, 1), (7, 10, 1), (2, 5, 9), (5, 0, 4), (1, 8, 3)]
"""(slot, start, count)."""
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
    """Computes a limited number of tokens at a time. A result depends only on the row and position."""

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
        if sum(counts) + sum(max(0, drafts - 1) for drafts in plan.drafts) > self.max_tokens:
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
def test_split_results_equal_the_whole_step(max_tokens: int) -> None:
    plan = plan_of_rows(ROWS, SAMPLES)
    whole, small = SmallDevice(1000), SmallDevice(max_tokens)
    expected = OomSplit(whole.release).compute(plan, whole.compute)
    smaller = OomSplit(small.release)
    assert smaller.compute(plan, small.compute) == expected
    assert small.computed == whole.computed, "each token must be computed once, in order"
    assert small.num_deltas == 1, "deltas must be applied once"
    assert smaller.num_split == 1, "num_split counts steps, not cuts"
    assert small.num_releases > 0


def test_a_step_with_drafts_is_repeated_without_them() -> None:
    rows = [(3, 5, 1), (7, 10, 1), (2, 5, 1)]
    plan = replace(plan_of_rows(rows, [1, 1, 1]), drafts=pack_u8([9, 9, 1]))
    device, whole = SmallDevice(3), SmallDevice(1000)
    smaller = OomSplit(device.release)
    assert smaller.compute(plan, device.compute) == whole.compute(replace(plan, drafts=pack_u8([1, 1, 1])))
    assert (device.computed, smaller.num_split) == (whole.computed, 1)


def test_drafts_of_a_single_row_do_not_prevent_its_token() -> None:
    plan = replace(plan_of_rows([(3, 5, 1)], [1]), drafts=pack_u8([9]))
    device = SmallDevice(1)
    OomSplit(device.release).compute(plan, device.compute)
    assert device.computed == [(3, 5)]


def test_drafts_count_as_tokens_of_a_step_that_cannot_be_repeated() -> None:
    rows = [(3, 5, 1), (7, 10, 1)]
    plan = replace(plan_of_rows(rows, [1, 1]), drafts=pack_u8([9, 9]))
    device = DeviceWithStates(8)
    smaller = OomSplit(device.release, device.continue_states)
    with pytest.raises(torch.OutOfMemoryError):
        smaller.compute(plan, device.compute)
    device.started.clear()
    smaller.compute(plan, device.compute)
    assert device.computed == [(3, 5), (7, 10)]


def test_a_step_that_fits_is_not_split() -> None:
    plan, device = plan_of_rows(ROWS, SAMPLES), SmallDevice(18)
    smaller = OomSplit(device.release)
    assert len(unpack_i32(smaller.compute(plan, device.compute).token_ids)) == 4
    assert (smaller.num_split, device.num_releases) == (0, 0)


def test_a_split_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    plan, device = plan_of_rows(ROWS, SAMPLES), SmallDevice(4)
    smaller = OomSplit(device.release)
    for _ in range(3):
        smaller.compute(plan, device.compute)
    assert smaller.num_split == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tried to allocate too much" in caplog.text


def test_out_of_memory_with_one_token_is_raised() -> None:
    device = SmallDevice(0)
    smaller = OomSplit(device.release)
    with pytest.raises(torch.OutOfMemoryError):
        smaller.compute(plan_of_rows(ROWS, SAMPLES), device.compute)
    with pytest.raises(torch.OutOfMemoryError):
        smaller.compute(plan_of_rows([(0, 3, 1)], [1]), device.compute)


@dataclass
class DeviceWithStates(SmallDevice):
    """A device with recurrent states. It overwrites them, so a row that started with them may not be computed again."""

    started: set[int] = field(default_factory=set)
    """Slots of a step that ran out of memory."""
    continued: list[int] = field(default_factory=list)

    def compute(self, plan: StepPlan) -> StepResult:
        slots, starts = (np.frombuffer(column, np.int32).tolist() for column in (plan.slots, plan.starts))
        lost = {slot for slot, start in zip(slots, starts, strict=True) if start}
        assert not lost & self.started, "an overwritten state was used"
        try:
            return super().compute(plan)
        except torch.OutOfMemoryError:
            self.started |= lost
            raise

    def continue_states(self, slot: int) -> bytes:
        self.continued.append(slot)
        return pack_i32([slot, 0, 0, 5])


def test_a_step_with_overwritten_states_fails_and_later_steps_are_split_first() -> None:
    plan, device, whole = plan_of_rows(ROWS, SAMPLES), DeviceWithStates(4), SmallDevice(1000)
    smaller = OomSplit(device.release, device.continue_states)
    failures = 0
    while True:
        device.started.clear()  # after a failure all is recomputed
        device.computed.clear()
        try:
            result = smaller.compute(plan, device.compute)
            break
        except torch.OutOfMemoryError:
            failures += 1
    assert result == whole.compute(plan)
    assert device.computed == whole.computed
    assert failures == 2, "expected failures at 18 and at 9 tokens"
    assert smaller.num_split == 2
    assert set(device.continued) == {2}, "only this row has more than 4 tokens"


def test_a_step_of_new_requests_is_retried() -> None:
    plan = plan_of_rows([(3, 0, 7), (7, 0, 1), (2, 0, 9)], [1, 1, 1])
    device, whole = DeviceWithStates(5), SmallDevice(1000)
    smaller = OomSplit(device.release, device.continue_states)
    assert smaller.compute(plan, device.compute) == whole.compute(plan)
    device.max_tokens = 17
    device.computed.clear()
    assert smaller.compute(plan, device.compute) == whole.compute(plan), (
        "must run unsplit once memory is free"
    )
    later = plan_of_rows([(3, 7, 16)], [1])
    device.num_releases = 0
    smaller.compute(later, device.compute)
    assert device.num_releases == 0, "no step may release memory"


def test_the_rest_of_a_row_continues_its_states() -> None:
    received: list[bytes] = []
    device = DeviceWithStates(4)

    def compute(plan: StepPlan) -> StepResult:
        result = device.compute(plan)
        received.append(plan.blocks)
        return result

    OomSplit(device.release, device.continue_states).compute(plan_of_rows([(3, 0, 8)], [1]), compute)
    assert received == [pack_i32([3, 0, 0, 1]), pack_i32([3, 0, 0, 5])]
