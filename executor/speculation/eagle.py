"""Drafts of an EAGLE-3 head, from hidden states of the served model.

The head computes token ``t[i]`` from its embedding and features of the token before it, and draws ``t[i + 1]``:

    served model has computed   t0 … t7 t8                 t9 is its newest draw
    features known              f0 … f7 f8
    first step of the head      … (t8, f7) (t9, f8)        draws d10, with hidden state h9
    second step                 (d10, h9)                  draws d11, and so on

Features of the newest tokens are kept per slot; keys and values of their tokens are computed when drafts are needed, or when
there are many. The last features of each block are kept too, for requests that start after a cached prefix. The first token has
features of zeros. Keys and values of a block are not restored by swaps: then the drafts are worse.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.cpu.program.stage import Stage
from quintet.executor.memory import lazy_zeros
from quintet.executor.model_config.eagle import MAX_PENDING, NUM_FEATURES
from quintet.executor.models.eagle import EagleHead
from quintet.executor.ragged import Int, ranges
from quintet.executor.sampling.settings import Settings
from quintet.executor.sequences import plan_of_rows
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.drafters import DraftRows
from quintet.executor.speculation.gram_index import Tokens
from quintet.executor.speculation.lengths import StepTime
from quintet.wire.config import DraftModelConfig
from quintet.wire.step import StepPlan

_UNKNOWN = -1


class EagleDrafter:
    """A `quintet.executor.speculation.drafters.Drafter` with a head, its KV memory, and features."""

    def __init__(
        self,
        config: DraftModelConfig,
        head: EagleHead,
        runner: ProgramRunner,
        stage: Stage,
        target: Stage,
        num_blocks: int,
        tables: SlotTables,
        settings: Settings,
    ) -> None:
        """runner, stage: of the head. target: of the served model, as ``tables`` and ``settings``."""
        assert stage.received_hidden is not None, "a head reads features"
        self._head, self._runner, self._stage, self._target = head, runner, stage, target
        self._input = stage.received_hidden
        self._settings, self._tables = settings, tables.of_group(config.group, config.model.kv)
        self._token_ids: Tokens = tables.token_ids.numpy()
        self._block_table, self._block_size = self._tables.block_table[0], config.model.kv.block_size
        num_slots, width = len(self._token_ids), self._input.shape[1]
        cpu, dtype = torch.device("cpu"), self._input.dtype
        self._features = lazy_zeros((num_slots, NUM_FEATURES, width), dtype, cpu)
        """Features of the newest tokens of each slot, at their position modulo `NUM_FEATURES`."""
        self._block_features = lazy_zeros((num_blocks, width), dtype, cpu)
        """Features of the last token of each block."""
        self._num_computed: Int = np.zeros(num_slots, np.int64)
        """Leading tokens of each slot with keys and values of the head."""
        self._num_known: Int = np.zeros(num_slots, np.int64)
        """Leading tokens of each slot with features."""
        self._new_slots: list[int] = []
        self._token_map: Tokens | None = (
            None if head.token_map is None else head.token_map.numpy().astype(np.int32)
        )
        self._time = StepTime()

    output_cache = None

    @property
    def step_time(self) -> tuple[float, float]:
        """See `Drafter.step_time`."""
        return self._time.fit()

    def end(self, slot: int, num_tokens: int) -> None:
        """See `Drafter.end`."""

    def note(self, plan: StepPlan) -> None:
        """See `Drafter.note`."""
        self._new_slots = [row.slot for row in plan.new_rows]
        self._num_known[self._new_slots] = _UNKNOWN

    def note_computed(self, slots: Int, starts: Int, counts: Int, num_valid: Int) -> None:
        """See `Drafter.note_computed`. Keep the features of the rows' tokens; compute long rows."""
        rows, positions = ranges(starts, num_valid)
        offsets = np.cumsum(counts) - counts
        tokens = torch.from_numpy(offsets[rows] + positions - starts[rows])
        joined = torch.cat([hidden.index_select(0, tokens) for hidden in self._target.aux_hidden], dim=1)
        features = self._head.fused(joined)
        self._keep_block_features(slots[rows], positions, features)
        for row in np.flatnonzero(np.isin(slots, self._new_slots)).tolist():
            self._begin(int(slots[row]), int(starts[row]))
        self._new_slots = [slot for slot in self._new_slots if slot not in slots]
        ends = starts + num_valid
        firsts = np.cumsum(num_valid) - num_valid
        for row in np.flatnonzero(ends - self._num_computed[slots] > MAX_PENDING).tolist():
            own = features[firsts[row] : firsts[row] + num_valid[row]]
            self._compute_row(int(slots[row]), int(starts[row]), own)
        newest = positions >= ends[rows] - NUM_FEATURES
        places = torch.from_numpy(slots[rows][newest]), torch.from_numpy(positions[newest] % NUM_FEATURES)
        self._features[places] = features[torch.from_numpy(newest)]
        self._num_known[slots] = ends

    def propose(self, rows: DraftRows) -> list[Tokens]:
        """See `Drafter.propose`."""
        slots, ends = rows.slots, rows.num_tokens
        begins = self._num_computed[slots]
        is_known = self._num_known[slots] == ends - 1
        counts = np.where(is_known, rows.counts, 0)
        missing = np.where(is_known, ends - begins, 0)
        counts[np.cumsum(missing) > len(self._input)] = 0
        missing[counts == 0] = 0
        which, positions = ranges(begins, missing)
        features = self._features_of(slots[which], positions - 1)
        hidden = self._step(slots, begins, missing, features)
        self._num_computed[slots] = np.where(counts > 0, ends, begins)
        for depth in range(1, int(counts.max(initial=0))):
            hidden = hidden[torch.from_numpy((counts > depth)[counts > depth - 1])]
            hidden = self._step(slots, ends + (depth - 1), (counts > depth).astype(np.int64), hidden)
        return [
            self._token_ids[slot, end : end + count].copy()
            for slot, end, count in zip(slots.tolist(), ends.tolist(), counts.tolist(), strict=True)
        ]

    def _begin(self, slot: int, start: int) -> None:
        """Begin a request after a cached prefix of ``start`` tokens; its blocks hold their keys and values."""
        self._num_computed[slot] = self._num_known[slot] = start
        block, rest = divmod(start, self._block_size)
        if start and not rest:
            features = self._block_features[self._block_table[slot, block - 1]]
        else:
            features = torch.zeros_like(self._features[slot, 0])
        self._features[slot, (start - 1) % NUM_FEATURES] = features

    def _keep_block_features(self, slots: Int, positions: Int, features: torch.Tensor) -> None:
        is_last = (positions + 1) % self._block_size == 0
        if is_last.any():
            blocks = self._block_table[slots[is_last], positions[is_last] // self._block_size]
            self._block_features[torch.from_numpy(blocks.astype(np.int64))] = features[
                torch.from_numpy(is_last)
            ]

    def _features_of(self, slots: Int, positions: Int) -> torch.Tensor:
        """Return kept features ``[tokens, width]``; those before the first token are zeros."""
        found = self._features[torch.from_numpy(slots), torch.from_numpy(positions % NUM_FEATURES)]
        found[torch.from_numpy(positions < 0)] = 0.0
        return found

    def _compute_row(self, slot: int, start: int, features: torch.Tensor) -> None:
        """Compute the missing tokens of a row without drawing. features: of its tokens from ``start`` on."""
        begin, end = int(self._num_computed[slot]), start + len(features)
        before = np.arange(begin - 1, start)
        kept = self._features_of(np.full(len(before), slot), before)
        features = torch.cat((kept, features[:-1]))  # of the tokens [begin - 1, end - 1)
        for first in range(begin, end, len(self._input)):
            count = min(end - first, len(self._input))
            self._input[:count] = features[first - begin : first - begin + count]
            one = (np.array([slot]), np.array([first]), np.array([count]))
            self._runner.forward(Rows(plan_of_rows(*one, np.array([False]))), self._tables)
        self._num_computed[slot] = end

    def _step(self, slots: Int, starts: Int, counts: Int, features: torch.Tensor) -> torch.Tensor:
        """Compute ``counts`` tokens of each row, and write the next draft into the token table.

        features: ``[tokens, width]``. Returns the hidden states of the rows' last tokens, of rows with tokens.
        """
        used = counts > 0
        if not used.any():
            return features
        began_s = time.perf_counter()
        self._input[: len(features)] = features
        slots, starts, counts = slots[used], starts[used], counts[used]
        rows = Rows(plan_of_rows(slots, starts, counts, np.ones(len(slots), np.bool_)))
        drawn = np.frombuffer(
            self._runner.forward_and_draw(rows, self._tables, self._settings, None), np.int32
        )
        if self._token_map is not None:
            self._token_ids[slots, starts + counts] = self._token_map[drawn]
        hidden = self._stage.hidden.index_select(0, torch.from_numpy(np.cumsum(counts) - 1))
        self._time.note(int(counts.sum()), time.perf_counter() - began_s)
        return hidden
