"""Step arrays of a program: arrays that a plan becomes, plans that are rejected, progress marks."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from quintet.executor.backends.cpu.ops.host_library import open_library
from quintet.executor.backends.cpu.program.library import program_library
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.ragged import ranges
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.codec import pack_i32, pack_u8
from quintet.wire.kv_spec import full_layers
from quintet.wire.step import StepPlan

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

MAX_TOKENS, MAX_ROWS, MAX_LENGTH, NUM_SLOTS = 60, 6, 50, 9


def plan_of(slots: list[int], starts: list[int], counts: list[int], samples: list[int]) -> StepPlan:
    columns = {"slots": pack_i32(slots), "starts": pack_i32(starts), "counts": pack_i32(counts)}
    return StepPlan(
        step=7, sent_ns=0, freed=b"", new_rows=[], blocks=b"", copies=b"", samples=pack_u8(samples), **columns
    )


def new_step() -> tuple[Step, SlotTables]:
    library = program_library()
    assert library is not None
    tables = SlotTables(NUM_SLOTS, MAX_LENGTH, full_layers(1, 1, 8, 4, 4), torch.device("cpu"))
    shape = tuple(tables.token_ids.shape)
    tables.token_ids.copy_(torch.arange(shape[0] * shape[1]).reshape(shape))
    return Step(library, MAX_TOKENS, MAX_ROWS), tables


@pytest.mark.parametrize("seed", range(30))
def test_step_arrays_equal_those_of_numpy(seed: int) -> None:
    random = np.random.default_rng(seed)
    step, tables = new_step()
    for _ in range(3):  # consecutive steps reuse the arrays
        num_rows = int(random.integers(1, MAX_ROWS + 1))
        counts = random.integers(1, 1 + int(random.choice([1, MAX_TOKENS // MAX_ROWS])), num_rows)
        starts = random.integers(0, MAX_LENGTH - counts + 1)
        slots, samples = random.permutation(NUM_SLOTS)[:num_rows], random.integers(0, 2, num_rows)
        rows = Rows(plan_of(slots.tolist(), starts.tolist(), counts.tolist(), samples.tolist()))
        assert step.fill(rows, tables) == (starts + counts).max()
        owners, positions = ranges(starts, counts)
        expected = {
            "row_slots": slots, "row_starts": starts, "row_counts": counts, "row_offsets": rows.offsets,
            "positions": positions, "token_ids": tables.token_ids.numpy()[slots[owners], positions],
            "output_tokens": (rows.offsets + counts - 1)[rows.sampling], "output_slots": slots[rows.sampling],
            "output_positions": (starts + counts)[rows.sampling],
        }  # fmt: skip
        for name, column in expected.items():
            np.testing.assert_array_equal(step.columns[name][: len(column)], column, err_msg=name)
        assert (step.c.num_rows, step.c.num_tokens) == (num_rows, len(positions))
        assert step.c.num_outputs == len(rows.sampling)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (([0, 9], [0, 0], [1, 1], [1, 1]), "row 1 of 2: slot 9, .* 9 slots of 50 tokens"),
        (([-1], [0], [1], [1]), "slot -1"),
        (([0], [-1], [1], [1]), "1 tokens from position -1;"),
        (([0], [0], [0], [0]), "0 tokens from position 0;"),
        (([0], [50], [1], [1]), "1 tokens from position 50;"),
        (([0], [2**31 - 1], [2**31 - 1], [1]), "tokens from position 2147483647"),
        ((list(range(7)), [0] * 7, [1] * 7, [1] * 7), "row 6 of 7.* at most 6 rows"),
        (([0, 1], [0, 0], [40, 40], [1, 1]), "row 1 of 2.* 60 tokens"),
        (([0, 1], [0], [1], [1]), "columns of 8, 4 and 4 bytes; expected 4 each, for 1 rows"),
    ],
)
def test_a_plan_that_does_not_fit_is_rejected(columns: tuple[list[int], ...], why: str) -> None:
    step, tables = new_step()
    with pytest.raises(ValueError, match=why):
        step.fill(Rows(plan_of(*columns)), tables)


def test_a_token_may_follow_the_last_position() -> None:
    """A plan that the core made before it knew the end of the previous step samples this token."""
    step, tables = new_step()
    assert step.fill(Rows(plan_of([3], [MAX_LENGTH - 1], [1], [1])), tables) == MAX_LENGTH


def test_marks_are_in_order() -> None:
    library = program_library()
    assert library is not None
    step, tables = new_step()
    x, y = torch.ones(MAX_TOKENS, 32), torch.zeros(MAX_TOKENS, 32)
    program = library.new()
    for _ in range(2):
        library.take_outputs(program, x.data_ptr(), 32, 32, y.data_ptr(), 32, 2)
        library.mark(program)
    library.take_outputs(program, x.data_ptr(), 32, 32, y.data_ptr(), 32, 2)
    step.fill(Rows(plan_of([3], [0], [5], [1])), tables)
    started = time.monotonic_ns()
    library.run(program, step.address, 0, library.size(program))
    marks = step.columns["marks"].tolist()
    assert started <= marks[0] <= marks[1] <= time.monotonic_ns()
    step.c.marks = None
    library.run(program, step.address, 0, library.size(program))
    assert step.columns["marks"].tolist() == marks
    library.delete(program)
