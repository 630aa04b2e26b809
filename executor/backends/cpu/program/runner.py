"""Runs a recorded program over the worker's plans; implements `quintet.executor.runner.Runner`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.embeds import embeds_of
from quintet.executor.model_config.share import most_outputs
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import EngineConfig


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


class ProgramRunner:
    """A model's program, its KV memory, and the current step."""

    def __init__(self, program: ModelProgram, config: EngineConfig, span: TraceSpan = no_span) -> None:
        """program: with all layers. In a tensor-parallel model only rank 0 has a runner; the others execute its orders.

        The caller fills ``program.received_hidden`` before each step if there is one (a draft head).
        """
        assert program.logits is not None and program.share.is_first, program.share
        self._span = span
        self._program = program
        self.max_outputs, self.spans = program.max_outputs, program.spans
        self._logits = program.logits  # [max_outputs, vocab]
        self._library = library = program.library
        library.mark(program.handle)
        append_draw(library, program.handle, self._logits, program)
        self._size = library.size(program.handle)
        self._step = Step(library, program.max_tokens, most_outputs(config.scheduler))
        self._step.c.rotations = program.rotations.address
        if span is no_span:
            self._step.c.marks = None
        self._length = 0
        """Largest position of the step plus 1."""

    @property
    def work_done(self) -> int:
        """Number of work pieces that the compute threads have finished."""
        return self._program.work_done

    @property
    def seconds(self) -> float:
        """Total time spent in the program."""
        return self._program.seconds

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        """See `Runner.forward`."""
        self._fill(rows, tables, None)
        self._run(self._embed(rows) if rows.plan.embeds else 0, self._program.layers_end)

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `Runner.logits`."""
        assert self._step.c.num_rows, "no step has run"
        assert len(tokens) <= self.max_outputs, (len(tokens), self.max_outputs)
        with self._step.with_outputs(tokens):
            self._run(self._program.layers_end, self._program.end)
        return self._logits[: len(tokens)]

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes:
        """See `Runner.forward_and_draw`."""
        self._fill(rows, tables, settings)
        begin = self._embed(rows) if rows.plan.embeds else 0
        if masks is None:
            self._run(begin, self._size)
        else:
            self._run(begin, self._program.end)
            self._step.c.masks = masks.wait().address
            try:
                self._run(self._program.end, self._size)
            finally:
                self._step.c.masks = None
        step = self._step
        tokens = step.columns["drawn"][: step.c.num_outputs].tobytes()
        if self._span is not no_span:
            self._report_spans(step.columns["marks"].tolist() if tokens else [])
        return tokens

    def _embed(self, rows: Rows) -> int:
        """Run the embedding of a step with input embeddings; return the index of the next operation."""
        embeds = embeds_of(rows, self._program.dtype, self._logits.device)
        if embeds is None:
            return 0
        self._program.embed(self._step.address, self._length, embeds)
        return self._program.embedding_end

    def _report_spans(self, marks: list[int]) -> None:
        for part, mark in zip(("layers", "logits"), marks, strict=False):
            self._span(part, None, None, mark)
        self._span("sampling" if marks else "layers")

    def _fill(self, rows: Rows, tables: SlotTables, settings: Settings | None) -> None:
        self._length = self._step.fill(rows, tables, settings)
        if self._length > self._program.rotations.num_ready:
            self._program.rotations.fill(self._length, rows, tables)
        self._span("arrays")

    def profile(self, rows: Rows, tables: SlotTables, tokens: Int) -> list[tuple[str, float]]:
        """Run a step like `forward` and `logits`, one operation at a time; return the name and seconds of each."""
        self.forward(rows, tables)
        self.logits(tokens)
        return [(span.name, self._run(span.begin, span.end)) for span in self.spans]

    def balance(self, starts: Sequence[int], counts: Sequence[int], threads: int) -> list[OpBalance]:
        """Return the predicted load balance of each operation in a step with these rows; runs nothing.

        starts, counts: as in a plan. Do not call it between `forward` and `logits`, because it overwrites the step. The work of
        experts is known only while a step runs: the result has that of the last step, with its number of threads.
        """
        self._step.fill_counts(starts, counts)
        table = np.zeros((self._size, 6), np.int64)
        self._library.balance(
            self._program.handle, self._step.address, threads, 0, self._size, table.ctypes.data
        )
        names = [span.name for span in self.spans for _ in range(span.begin, span.end)]
        names += ["draw"] * (self._size - len(names))
        return [OpBalance(name, *row) for name, row in zip(names, table.tolist(), strict=True)]

    def _run(self, begin: int, end: int) -> float:
        return self._program.run(self._step.address, begin, end, self._length)


def append_draw(library: ProgramLibrary, handle: int, logits: torch.Tensor, program: ModelProgram) -> None:
    """Append the sampling of a step's tokens from ``logits [max_outputs, vocab]``."""
    library.draw(
        *(handle, logits.data_ptr(), logits.stride(0), FLOAT_CODES[logits.dtype], program.vocab_size)
    )
