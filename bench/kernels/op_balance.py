"""Measurement of a program by operation: time, and predicted balance of the work over threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.ragged import Int
from quintet.executor.slots import Rows, SlotTables


@dataclass(frozen=True, slots=True)
class OpBalance:
    """Work of one operation in a step, split for a number of threads."""

    name: str
    pieces: int
    takes: int
    """Number of times that threads take pieces."""
    cost: int
    """Sum over all pieces, in units of about one multiply-add."""
    busiest: int
    """Cost of the busiest thread, if all threads are equally fast."""
    bytes: int
    """Bytes of weights and KV that pieces read."""
    bytes_again: int
    """Bytes among these that another piece has read before."""


def profile(runner: ProgramRunner, rows: Rows, tables: SlotTables, tokens: Int) -> list[tuple[str, float]]:
    """Run a step like `forward` and `logits`, one operation at a time; return the name and seconds of each."""
    runner.forward(rows, tables)
    runner.logits(tokens)
    return [(span.name, runner.run(span.begin, span.end)) for span in runner.spans]


def balance_of(
    runner: ProgramRunner, starts: Sequence[int], counts: Sequence[int], threads: int
) -> list[OpBalance]:
    """Return the predicted load balance of each operation in a step with these rows; runs nothing.

    starts, counts: as in a plan. Do not call it between `forward` and `logits`, because it overwrites the step. The work of
    experts is known only while a step runs: the result has that of the last step, with its number of threads.
    """
    _fill_counts(runner.step, starts, counts)
    program, size = runner.program, runner.num_operations
    table = np.zeros((size, 6), np.int64)
    program.library.balance(program.handle, runner.step.address, threads, 0, size, table.ctypes.data)
    names = [span.name for span in runner.spans for _ in range(span.begin, span.end)]
    names += ["draw"] * (size - len(names))
    return [OpBalance(name, *row) for name, row in zip(names, table.tolist(), strict=True)]


def _fill_counts(step: Step, starts: Sequence[int], counts: Sequence[int]) -> None:
    """Fill in row lengths without tokens, in the first slots; every row draws."""
    num_rows, c = len(counts), step.c
    c.num_tokens, c.num_rows, c.num_outputs = sum(counts), num_rows, num_rows
    assert num_rows <= c.max_rows and c.num_tokens <= c.max_tokens, (num_rows, c.num_tokens)
    ends = np.cumsum(counts)
    for name, column in (
        ("row_slots", np.arange(num_rows)),
        ("row_starts", starts),
        ("row_counts", counts),
        ("row_offsets", ends - counts),
        ("output_tokens", ends - 1),
    ):
        step.columns[name][:num_rows] = column
