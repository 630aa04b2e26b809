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
from quintet.executor.memory import Bits, bits_of, from_bits, to_device
from quintet.executor.models.draft_heads import MedusaHeads
from quintet.executor.ragged import Int, ranges
from quintet.executor.runner import Runner
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.sequences import plan_of_rows
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.drafters import Drafter, DraftRows, compute_and_draw
from quintet.executor.speculation.gram_index import Tokens
from quintet.wire.step import StepPlan


class MedusaDrafter(Drafter):
    """A drafter with a runner for each head."""

    reads_steps = True

    def __init__(
        self,
        model: MedusaHeads,
        heads: Sequence[tuple[torch.Tensor, Runner]],
        target: ModelProgram | None,
        num_kept: int,
        tables: SlotTables,
        sampler: Sampler,
    ) -> None:
        """heads: features ``[max_tokens, width]`` of a step's tokens, and runner, of each. target: of the served model, as
        ``tables`` and ``sampler``; None if steps are not observed. num_kept: number of newest tokens of a slot with features.
        """
        super().__init__()
        self._model, self._target, self._tables, self._sampler = model, target, tables, sampler
        self._heads, self._token_ids = heads, tables.token_ids.numpy()
        like, num_slots = heads[0][0], len(self._token_ids)
        self._features = like.new_zeros((num_slots, num_kept, like.shape[1]))
        """Features of the newest computed tokens of each slot."""
        self._begins, self._ends = np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64)
        """Positions of these tokens in each slot; none unless begin < end."""

    def note(self, plan: StepPlan) -> None:
        if plan.new_rows:
            self._ends[[row.slot for row in plan.new_rows]] = 0

    def observe(self, num_tokens: int) -> Bits:
        assert self._target is not None, "steps are not observed"
        (hidden,) = self._target.aux_hidden
        return bits_of(hidden)[:num_tokens]

    def note_computed(self, slots: Int, starts: Int, counts: Int, num_valid: Int, hidden: Bits) -> None:
        """See `Drafter.note_computed`. Keep the features of each row's newest token."""
        ends = starts + num_valid
        newest = hidden[np.cumsum(counts) - counts + num_valid - 1]
        self._keep(slots, ends - 1, ends, from_bits(newest, self._features.dtype))

    def _keep(self, slots: Int, begins: Int, ends: Int, hidden: torch.Tensor) -> None:
        """Keep the features of the tokens ``[begins, ends)`` of each slot. hidden: of the served model, ``[tokens, width]``."""
        rows, offsets = ranges(np.zeros_like(slots), ends - begins)
        self._features[self._on_device(slots[rows]), self._on_device(offsets)] = self._model.fused(hidden)
        self._begins[slots], self._ends[slots] = begins, ends

    def _on_device(self, index: Int) -> torch.Tensor:
        return to_device(index, self._features.device)

    def num_missing(self, slots: Int, num_tokens: Int) -> Int:
        return np.zeros_like(slots)

    def propose(self, rows: DraftRows) -> list[Tokens]:
        slots, ends = rows.slots, rows.num_tokens
        counts = np.minimum(rows.counts, len(self._heads))
        newest = ends - 2  # position of the newest computed token
        counts[(newest < self._begins[slots]) | (newest >= self._ends[slots])] = 0
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
        index = positions - head - 2 - self._begins[slots]
        features[: len(slots)] = self._features[self._on_device(slots), self._on_device(index)]
        ones = np.ones_like(slots)
        rows = Rows(plan_of_rows(slots, positions - 1, ones, ones.astype(np.bool_)))
        compute_and_draw(runner, rows, self._tables, self._sampler, has_same_ids=True)
        self._time.note(len(slots), time.perf_counter() - began_s)
