"""Runs a recorded program over the worker's plans; implements `quintet.executor.runner.Runner`."""

from __future__ import annotations

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


class ProgramRunner:
    """A model's program, its KV memory, and the current step."""

    def __init__(self, program: ModelProgram, config: EngineConfig, span: TraceSpan = no_span) -> None:
        """program: with all layers. In a tensor-parallel model only rank 0 has a runner; the others execute its orders.

        The caller fills ``program.received_hidden`` before each step if there is one (a draft head).
        """
        assert program.logits is not None and program.share.is_first, program.share
        self._span = span
        self.program = program
        self.max_outputs, self.spans = program.max_outputs, program.spans
        self._logits = program.logits  # [max_outputs, vocab]
        library = program.library
        library.mark(program.handle)
        append_draw(library, program.handle, self._logits, program)
        self.num_operations = library.size(program.handle)
        self.step = Step(library, program.max_tokens, most_outputs(config.scheduler))
        self.step.c.rotations = program.rotations.address
        if span is no_span:
            self.step.c.marks = None
        self._length = 0
        """Largest position of the step plus 1."""

    @property
    def work_done(self) -> int:
        """Number of work pieces that the compute threads have finished."""
        return self.program.work_done

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        """See `Runner.forward`."""
        self._fill(rows, tables, None)
        self.run(self._embed(rows) if rows.plan.embeds else 0, self.program.layers_end)

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `Runner.logits`."""
        assert self.step.c.num_rows, "no step has run"
        assert len(tokens) <= self.max_outputs, (len(tokens), self.max_outputs)
        with self.step.with_outputs(tokens):
            self.run(self.program.layers_end, self.program.end)
        return self._logits[: len(tokens)]

    def normed(self, tokens: Int) -> torch.Tensor:
        """See `quintet.executor.pooling.HiddenSource`."""
        program = self.program
        assert program.normed is not None, "the configuration of the program has no pooling"
        with self.step.with_outputs(tokens):
            self.run(program.layers_end, program.normed_end)
        return program.normed[: len(tokens)]

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes:
        """See `Runner.forward_and_draw`."""
        self._fill(rows, tables, settings)
        begin = self._embed(rows) if rows.plan.embeds else 0
        if masks is None:
            self.run(begin, self.num_operations)
        else:
            self.run(begin, self.program.end)
            self.step.c.masks = masks.wait().address
            try:
                self.run(self.program.end, self.num_operations)
            finally:
                self.step.c.masks = None
        step = self.step
        tokens = step.columns["drawn"][: step.c.num_outputs].tobytes()
        if self._span is not no_span:
            self._report_spans(step.columns["marks"].tolist() if tokens else [])
        return tokens

    def _embed(self, rows: Rows) -> int:
        """Run the embedding of a step with input embeddings; return the index of the next operation."""
        embeds = embeds_of(rows, self.program.dtype, self._logits.device)
        if embeds is None:
            return 0
        self.program.embed(self.step.address, self._length, embeds)
        return self.program.embedding_end

    def _report_spans(self, marks: list[int]) -> None:
        for part, mark in zip(("layers", "logits"), marks, strict=False):
            self._span(part, None, None, mark)
        self._span("sampling" if marks else "layers")

    def _fill(self, rows: Rows, tables: SlotTables, settings: Settings | None) -> None:
        self._length = self.step.fill(rows, tables, settings)
        if self._length > self.program.rotations.num_ready:
            self.program.rotations.fill(self._length, rows, tables)
        self._span("arrays")

    def run(self, begin: int, end: int) -> float:
        """Run operations ``[begin, end)`` of the current step; return the elapsed seconds."""
        return self.program.run(self.step.address, begin, end, self._length)


def append_draw(library: ProgramLibrary, handle: int, logits: torch.Tensor, program: ModelProgram) -> None:
    """Append the sampling of a step's tokens from ``logits [max_outputs, vocab]``."""
    library.draw(
        *(handle, logits.data_ptr(), logits.stride(0), FLOAT_CODES[logits.dtype], program.vocab_size)
    )
