"""Runs a model's recorded program over a worker's plans. A `quintet.executor.runner.Runner`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np
import torch

from quintet.executor.batch import Int, Rows
from quintet.executor.layers.rope import Rope
from quintet.executor.memory import lazy_zeros
from quintet.executor.models.model import CausalModel
from quintet.executor.program.library import ProgramLibrary
from quintet.executor.program.recorder import KvMemory, Recorder
from quintet.executor.program.step import Step
from quintet.executor.slots import SlotTables
from quintet.wire.config import EngineConfig
from quintet.wire.kv_spec import KvSpec
from quintet.wire.trace import Span, no_span

MIN_OUTPUTS = 256
"""Rows of logits there is room for at least: prompt log-probabilities come so many at a time."""

FIRST_ROTATIONS = 4096
"""Positions whose cosines and sines are computed at boot."""


class ProgramRunner:
    """A model's program, its KV memory and the step it ran last."""

    def __init__(
        self,
        library: ProgramLibrary,
        model: CausalModel,
        config: EngineConfig,
        dtype: torch.dtype,
        kv: KvMemory,
        span: Span = no_span,
    ) -> None:
        self._span = span
        limits = config.scheduler
        self.max_outputs = max(limits.max_num_seqs, MIN_OUTPUTS)
        self._library = library
        self._kv = kv
        self._dtype = dtype
        self._rotations = Rotations(model.rope, dtype, config.model.max_model_len + 1)
        max_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        recorder = Recorder(library, dtype, kv, max_tokens, self.max_outputs)
        hidden = model.forward(recorder)
        recorder.keep(hidden)
        num_forward = recorder.num_recorded
        logits = model.logits(recorder, recorder.take_outputs(hidden))
        recorder.keep(logits)
        self.spans = recorder.finish()
        self._forward_size = self.spans[num_forward].begin
        assert logits.tensor is not None
        self._logits = logits.tensor  # [max_outputs, vocab]
        self._program = recorder.handle
        self._alive = (model, recorder.memory)  # what the program's addresses point into
        self._size = self.spans[-1].end
        self._step: Step | None = None
        self.seconds = 0.0
        """Time spent in the program so far."""

    @property
    def work_done(self) -> int:
        """Pieces of work that the compute threads have done."""
        return int(self._library.pieces_done())

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """See `Runner.blocks`."""
        return self._kv.layers

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        """See `Runner.forward`."""
        step = self._step = Step(rows, tables)
        self._rotations.fill(step, tables)
        self._span("arrays")
        self._run(step, 0, self._forward_size)

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `Runner.logits`."""
        step, count = self._step, len(tokens)
        assert step is not None, "no step has run"
        assert count <= self.max_outputs, (count, self.max_outputs)
        tokens = np.ascontiguousarray(tokens)
        step.c.num_outputs, step.c.output_tokens = count, tokens.ctypes.data
        self._run(step, self._forward_size, self._size)
        return self._logits[:count]

    def profile(self, rows: Rows, tables: SlotTables, tokens: Int) -> list[tuple[str, float]]:
        """Compute a step as `forward` and `logits` do, one operation at a time; return each one's name and seconds."""
        self.forward(rows, tables)
        self.logits(tokens)
        assert self._step is not None
        return [(span.name, self._run(self._step, span.begin, span.end)) for span in self.spans]

    def _run(self, step: Step, begin: int, end: int) -> float:
        begun = time.perf_counter()
        self._library.run(self._program, ctypes.byref(step.c), begin, end)
        spent = time.perf_counter() - begun
        self.seconds += spent
        return spent

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `Runner.copy_blocks`."""
        for layer in self._kv.layers:
            layer[targets] = layer[sources]


class Rotations:
    """Cosines and sines by position, as many as were needed so far; by token where they depend on more than that."""

    def __init__(self, rope: Rope, dtype: torch.dtype, max_positions: int) -> None:
        self._rope = rope
        self._dtype = dtype
        self._max_positions = max_positions
        self._by_token = rope.spec.depends_on_length
        self._cosines = self._sines = torch.empty(0)
        if not self._by_token:
            self._grow(min(FIRST_ROTATIONS, max_positions))

    def fill(self, step: Step, tables: SlotTables) -> None:
        """Put the rotation of every token of ``step`` into it."""
        if self._by_token:
            prompt = tables.num_prompt_tokens[step.slots]
            lengths = np.maximum(prompt, step.positions + 1)
            positions = torch.from_numpy(np.ascontiguousarray(step.positions))
            self._cosines, self._sines = self._rope.cos_sin(positions, torch.from_numpy(lengths), self._dtype)
        elif int(step.positions.max()) >= len(self._cosines):
            needed = int(step.positions.max()) + 1
            self._grow(min(max(needed, 2 * len(self._cosines)), self._max_positions))
        step.c.cosines, step.c.sines = self._cosines.data_ptr(), self._sines.data_ptr()
        step.c.rope_by_token = self._by_token

    def _grow(self, num_positions: int) -> None:
        self._cosines, self._sines = self._rope.cos_sin(torch.arange(num_positions), None, self._dtype)


def allocate_kv(library: ProgramLibrary, spec: KvSpec, num_blocks: int, code: int) -> KvMemory | None:
    """Reserve the KV memory of every layer, or return None where the kernels do not take the shape.

    Pages are mapped when first written. code: of the numbers stored.
    """
    block_bytes = library.kv_block_bytes(code, spec.num_kv_heads, spec.head_dim, spec.block_size)
    if not block_bytes:
        return None
    cpu = torch.device("cpu")
    layers = tuple(lazy_zeros((num_blocks, block_bytes), torch.uint8, cpu) for _ in range(spec.num_layers))
    return KvMemory(layers, spec.block_size, code)
