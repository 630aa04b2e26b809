"""Runs a model's recorded program over a worker's plans. A `quintet.executor.runner.Runner`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.batch import Int, Rows
from quintet.executor.embeds import StepEmbeds, embeds_of
from quintet.executor.layers.attention import AttentionLayer
from quintet.executor.layers.rope import Rope
from quintet.executor.memory import lazy_zeros
from quintet.executor.models.model import CausalModel
from quintet.executor.ops.host_dtypes import FLOAT_CODES
from quintet.executor.parallel.library import OrderKind
from quintet.executor.parallel.ranks import PAIR_BYTES, Ranks, vector_records
from quintet.executor.program.library import ProgramLibrary
from quintet.executor.program.recorder import KvMemory, Recorder
from quintet.executor.program.step import CRotation, Step
from quintet.executor.ragged import ranges
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import SlotTables
from quintet.process.trace import Span, no_span
from quintet.wire.config import EngineConfig, SchedulerConfig
from quintet.wire.kv_spec import KvSpec

MIN_OUTPUTS = 256
"""Rows of logits there is room for at least: prompt log-probabilities come so many at a time."""

FIRST_ROTATIONS = 4096
"""Positions whose cosines and sines are computed at boot."""


@dataclass(frozen=True, slots=True)
class OpBalance:
    """One operation's work in a step, cut for some number of threads."""

    name: str
    pieces: int
    takes: int
    """How often a thread takes pieces."""
    cost: int
    """Of all pieces, in about the time of a multiplication and addition."""
    busiest: int
    """Of the busiest thread's, were all threads equally fast."""
    bytes: int
    """Of weights and KV that pieces read."""
    bytes_again: int
    """Of these, read before by another piece."""


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
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: of a model that is divided. Rank 0's runner has the others' run whatever it runs; theirs `follow`."""
        self._span = span
        self._ranks = ranks
        limits = config.scheduler
        self.max_outputs = most_outputs(limits)
        self._library = library
        self._kv = kv
        self._dtype = dtype
        self._rotations = Rotations(model.ropes, dtype, config.model.max_model_len + 1, ranks)
        max_tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        recorder = Recorder(library, dtype, kv, max_tokens, self.max_outputs, ranks)
        hidden = model.forward(recorder)
        recorder.keep(hidden)
        recorder.mark()
        logits = model.logits(recorder, recorder.take_outputs(hidden))
        if ranks is not None:
            logits = recorder.gather_logits(logits)
        recorder.keep(logits)
        recorded = recorder.finish()
        self.spans = recorded.spans
        assert recorder.embedded is not None and self.spans[0].name == "embedding", self.spans[0]
        self._embedded = recorder.embedded.tensor  # [max_tokens, width]
        self._embedding_end = self.spans[0].end
        [self._forward_size] = recorded.parts
        self._logits = logits.tensor  # [max_outputs, vocab]
        self._program = recorder.handle
        self._alive = (model, recorder.memory)  # what the program's addresses point into
        self._logits_end = self.spans[-1].end
        library.mark(self._program)
        library.draw(
            *(self._program, logits.address, self._logits.stride(0), FLOAT_CODES[dtype], model.vocab_size)
        )
        self._size = library.size(self._program)
        self._step = Step(library, max_tokens, limits.max_num_seqs)
        self._step.c.rotations = self._rotations.address
        if span is no_span:
            self._step.c.marks = None
        self._length = 0
        """The largest position of the step plus 1."""
        self.seconds = 0.0
        """Time spent in the program so far."""

    @property
    def work_done(self) -> int:
        """Pieces of work that the compute threads have done."""
        return int(self._library.pieces_done())

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """See `Runner.blocks`."""
        return self._kv.places

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        """See `Runner.forward`."""
        self._fill(rows, tables, None)
        self._run(self._embed(rows), self._forward_size)

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `Runner.logits`."""
        c, count = self._step.c, len(tokens)
        assert c.num_rows, "no step has run"
        assert count <= self.max_outputs, (count, self.max_outputs)
        tokens = np.ascontiguousarray(tokens)
        own = c.output_tokens
        try:
            c.num_outputs, c.output_tokens = count, tokens.ctypes.data
            self._run(self._forward_size, self._logits_end)
        finally:
            c.output_tokens = own  # whatever a signal's handler raises: the next plan is written there
        return self._logits[:count]

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes:
        """See `Runner.forward_and_draw`."""
        self._fill(rows, tables, settings)
        begin = self._embed(rows)
        if masks is None:
            self._run(begin, self._size)
        else:
            self._run(begin, self._logits_end)
            self._step.c.masks = masks.wait().address
            try:
                self._run(self._logits_end, self._size)
            finally:
                self._step.c.masks = None
        step = self._step
        tokens = step.columns["drawn"][: step.c.num_outputs].tobytes()
        if self._span is not no_span:
            self._tell(step.columns["marks"].tolist() if tokens else [])
        return tokens

    def _embed(self, rows: Rows) -> int:
        """Compute the beginning of a step that brings vectors of its own; return which operation is the next."""
        embeds = embeds_of(rows, self._dtype, self._embedded.device)
        if embeds is None:
            return 0
        self._run(0, self._embedding_end)
        if self._ranks is not None:
            records = np.zeros(len(embeds.tokens), vector_records(self._embedded.shape[1], self._dtype))
            records["token"], records["vector"] = embeds.tokens, embeds.vectors.contiguous().view(torch.uint8)
            self._ranks.tell_mail(OrderKind.EMBEDS, records.tobytes(), records.itemsize)
        embeds.put(self._embedded)
        return self._embedding_end

    def _tell(self, marks: list[int]) -> None:
        for part, mark in zip(("layers", "logits"), marks, strict=False):
            self._span(part, None, None, mark)
        self._span("sampling" if marks else "layers")

    def _fill(self, rows: Rows, tables: SlotTables, settings: Settings | None) -> None:
        length = self._step.fill(rows, tables, settings)
        self._rotations.fill(length, rows, tables)
        self._length = length
        self._span("arrays")

    def profile(self, rows: Rows, tables: SlotTables, tokens: Int) -> list[tuple[str, float]]:
        """Compute a step as `forward` and `logits` do, one operation at a time; return each one's name and seconds."""
        self.forward(rows, tables)
        self.logits(tokens)
        return [(span.name, self._run(span.begin, span.end)) for span in self.spans]

    def balance(self, starts: Sequence[int], counts: Sequence[int], threads: int) -> list[OpBalance]:
        """Return how a step of such rows would keep so many threads busy, an operation each. Nothing is run.

        starts, counts: as in a plan. Not to be called between `forward` and `logits`: it describes another step. What is known
        only while a step runs (experts' work) is told as the last step had it, cut for its threads: nothing before the first.
        """
        self._step.outline(starts, counts)
        figures = np.zeros((self._size, 6), np.int64)
        self._library.balance(self._program, self._step.address, threads, 0, self._size, figures.ctypes.data)
        names = [span.name for span in self.spans for _ in range(span.begin, span.end)]
        names += ["draw"] * (self._size - len(names))
        return [OpBalance(name, *row) for name, row in zip(names, figures.tolist(), strict=True)]

    def _run(self, begin: int, end: int) -> float:
        begun = time.perf_counter()
        if self._ranks is not None and begin < self._logits_end:
            self._ranks.tell_run(self._step.address, begin, min(end, self._logits_end), self._length)
        self._library.run(self._program, self._step.address, begin, end)
        spent = time.perf_counter() - begun
        self.seconds += spent
        return spent

    @property
    def step_address(self) -> object:
        """Where a rank hears of the step that it is to run."""
        return self._step.address

    def run_told(self, begin: int, end: int, length: int) -> None:
        """Run what rank 0 runs, over the step that was heard of; length: its largest position plus 1."""
        self._rotations.reach(length)
        self._library.run(self._program, self._step.address, begin, end)

    def put_told(self, mail: bytes) -> None:
        """Write vectors over what the embedding made, as rank 0 does."""
        width = self._embedded.shape[1]
        records = np.frombuffer(mail, vector_records(width, self._dtype))
        vectors = torch.from_numpy(records["vector"].copy()).view(self._dtype)
        StepEmbeds(torch.from_numpy(records["token"].astype(np.int64)), vectors).put(self._embedded)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `Runner.copy_blocks`."""
        if self._ranks is not None and self._ranks.share.rank == 0:
            pairs = torch.stack((sources, targets), 1).to(torch.int32).numpy()
            self._ranks.tell_mail(OrderKind.COPY_BLOCKS, pairs.tobytes(), PAIR_BYTES)
        for place in self._kv.places:
            place[targets] = place[sources]


def most_outputs(limits: SchedulerConfig) -> int:
    """Return how many rows of logits there is room for."""
    return max(limits.max_num_seqs, MIN_OUTPUTS)


class Rotations:
    """The rotations of a model, as a step points to them."""

    def __init__(
        self, ropes: Sequence[Rope], dtype: torch.dtype, max_positions: int, ranks: Ranks | None = None
    ) -> None:
        self._described = (CRotation * max(1, len(ropes)))()
        self._rotations: list[_Rotation] = []
        self._ranks, num_shared = None, 0
        for rope, described in zip(ropes, self._described, strict=False):
            shared, width = None, rope.spec.rotary_dim
            if ranks is not None and rope.spec.depends_on_length:
                shared = (
                    ranks.rotated(num_shared, width, dtype),
                    ranks.rotated(num_shared + width, width, dtype),
                )
                num_shared += 2 * width
                self._ranks = ranks
            self._rotations.append(_Rotation(rope, dtype, max_positions, described, shared))

    @property
    def address(self) -> int:
        """Where they are described, for as long as this lives."""
        return ctypes.addressof(self._described)

    def fill(self, length: int, rows: Rows, tables: SlotTables) -> None:
        """Describe the rotations of every token of ``rows``. length: their largest position plus 1."""
        if self._ranks is not None:
            self._ranks.wait_for_all()  # who still reads those of the last step
        for rotation in self._rotations:
            rotation.fill(length, rows, tables)

    def reach(self, length: int) -> None:
        """Describe those of positions up to ``length``, where nothing else matters: a rank knows no more of a step."""
        for rotation in self._rotations:
            rotation.reach(length)


class _Rotation:
    """Cosines and sines by position, as many as were needed so far; by token where they depend on more than that."""

    def __init__(
        self,
        rope: Rope,
        dtype: torch.dtype,
        max_positions: int,
        described: CRotation,
        shared: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """shared: where all ranks read cosines and sines by token, ``[max_tokens, rotary_dim]``; rank 0 fills it."""
        self._rope = rope
        self._shared = shared
        self._dtype = dtype
        self._max_positions = max_positions
        self._described = described
        self._by_token = rope.spec.depends_on_length
        self._num_positions = 0
        described.by_token = self._by_token
        if shared is not None:
            described.cosines, described.sines = (each.data_ptr() for each in shared)
        if not self._by_token:
            self._grow(min(FIRST_ROTATIONS, max_positions))

    def fill(self, length: int, rows: Rows, tables: SlotTables) -> None:
        """See `Rotations.fill`."""
        if self._by_token:
            owners, positions = ranges(rows.starts, rows.counts)
            prompts = tables.num_prompt_tokens[rows.slots[owners]]
            self._use(torch.from_numpy(positions), torch.from_numpy(prompts))
            for place, numbers in zip(self._shared or (), (self._cosines, self._sines), strict=False):
                place[: len(positions)].copy_(numbers.flatten(1))
        else:
            self.reach(length)

    def reach(self, length: int) -> None:
        """See `Rotations.reach`."""
        if not self._by_token and length > self._num_positions:
            self._grow(min(max(length, 2 * self._num_positions), self._max_positions))

    def _grow(self, num_positions: int) -> None:
        self._use(torch.arange(num_positions), None)
        self._num_positions = num_positions

    def _use(self, positions: torch.Tensor, prompts: torch.Tensor | None) -> None:
        self._cosines, self._sines = self._rope.cos_sin(positions, prompts, self._dtype)
        if self._shared is None:
            self._described.cosines, self._described.sines = (
                self._cosines.data_ptr(),
                self._sines.data_ptr(),
            )


def takes_layer(library: ProgramLibrary, layer: AttentionLayer, code: int, block_size: int) -> bool:
    """Whether the kernels compute such a layer over a cache of such numbers."""
    heads = (layer.num_kv_heads, layer.head_dim, layer.value_width)
    return bool(library.kv_block_bytes(code, *heads, block_size, layer.values_in_keys))


def allocate_kv(spec: KvSpec, num_blocks: int, code: int) -> KvMemory:
    """Reserve the KV memory of all layers. Pages are mapped when first written. code: of the numbers stored."""
    shape = (num_blocks, spec.layer_bytes)
    places = (lazy_zeros(shape, torch.uint8, torch.device("cpu")) for _ in range(spec.layers_per_block))
    return KvMemory(spec, tuple(places), code)
