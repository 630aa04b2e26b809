"""Drafts of Medusa heads. Each head reads the same features, of the newest token that the served model has computed.

    served model has computed   t0 … t7 t8      t9 is its newest draw
    features                    f8
    head 0, head 1, …           f8              draw d10, d11, …

A head draws with the request's sampling parameters and the random number of the position, as other heads do. Of the drafts before
its own, it sees only what penalties read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.memory import Bits, bits_of, from_bits
from quintet.executor.models.draft_heads import MedusaHeads
from quintet.executor.ragged import Int
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.sequences import plan_of_rows
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.drafters import Drafter, DraftRows, compute_and_draw
from quintet.executor.speculation.gram_index import Tokens
from quintet.wire.config import EngineConfig
from quintet.wire.step import StepPlan

_UNKNOWN = -1


class MedusaDrafter(Drafter):
    """A drafter with a program for each head."""

    reads_steps = True

    def __init__(
        self,
        model: MedusaHeads,
        programs: Sequence[ModelProgram],
        config: EngineConfig,
        target: ModelProgram,
        tables: SlotTables,
        sampler: Sampler,
    ) -> None:
        """programs: of the heads, with this configuration. target: of the served model, as ``tables`` and ``sampler``."""
        super().__init__()
        self._model, self._target, self._tables, self._sampler = model, target, tables, sampler
        self._heads = [(_input_of(program), ProgramRunner(program, config)) for program in programs]
        self._token_ids: Tokens = tables.token_ids.numpy()
        like = self._heads[0][0]
        self._features = torch.zeros((len(self._token_ids), like.shape[1]), dtype=like.dtype)
        """Features of the newest computed token of each slot."""
        self._num_known: Int = np.full(len(self._token_ids), _UNKNOWN, np.int64)
        """Leading tokens of each slot up to that token."""

    def note(self, plan: StepPlan) -> None:
        if plan.new_rows:
            self._num_known[[row.slot for row in plan.new_rows]] = _UNKNOWN

    def observe(self, num_tokens: int) -> Bits:
        (hidden,) = self._target.aux_hidden
        return bits_of(hidden)[:num_tokens]

    def note_computed(self, slots: Int, starts: Int, counts: Int, num_valid: Int, hidden: Bits) -> None:
        """See `Drafter.note_computed`. Keep the features of each row's newest token."""
        newest = from_bits(hidden[np.cumsum(counts) - counts + num_valid - 1], self._features.dtype)
        self._features[torch.from_numpy(slots)] = self._model.fused(newest)
        self._num_known[slots] = starts + num_valid

    def num_missing(self, slots: Int, num_tokens: Int) -> Int:
        return np.zeros_like(slots)

    def propose(self, rows: DraftRows) -> list[Tokens]:
        slots, ends = rows.slots, rows.num_tokens
        counts = np.minimum(rows.counts, len(self._heads))
        counts[self._num_known[slots] != ends - 1] = 0
        for depth in range(int(counts.max(initial=0))):
            used = counts > depth
            self._draw(depth, slots[used], ends[used] + depth)
        return [
            self._token_ids[slot, end : end + count].copy()
            for slot, end, count in zip(slots.tolist(), ends.tolist(), counts.tolist(), strict=True)
        ]

    def _draw(self, head: int, slots: Int, positions: Int) -> None:
        """Write a draft of each slot into the token table."""
        began_s = time.perf_counter()
        features, runner = self._heads[head]
        features[: len(slots)] = self._features[torch.from_numpy(slots)]
        ones = np.ones_like(slots)
        rows = Rows(plan_of_rows(slots, positions - 1, ones, ones.astype(np.bool_)))
        compute_and_draw(runner, rows, self._tables, self._sampler, has_same_ids=True)
        self._time.note(len(slots), time.perf_counter() - began_s)


def _input_of(program: ModelProgram) -> torch.Tensor:
    assert program.received_hidden is not None, "a head reads features"
    return program.received_hidden
