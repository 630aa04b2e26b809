"""Drafts of a head: an EAGLE head, or a multi-token prediction layer. It reads hidden states of the served model.

The head computes token ``t[i]`` from its embedding and features of the token before it, and draws ``t[i + 1]``:

    served model has computed   t0 … t7 t8                 t9 is its newest draw
    features known              f0 … f7 f8
    first step of the head      … (t8, f7) (t9, f8)        draws d10, with hidden state h9
    second step                 (d10, h9)                  draws d11, and so on

Features of the newest tokens are kept per slot; keys and values of their tokens are computed when drafts are needed, when there
are many, or at the end of a block. The first token has features of zeros.

Of several layers, each draws one more draft. Features of a layer are the hidden states of the layer before it, also of the
prompt. So each layer computes all tokens, and the drafts before its own; the last layer draws the remaining drafts:

    first layer         … (t8, f7)  (t9, f8)               draws d10, with hidden states … h8 h9
    second layer        … (t8, h7)  (t9, h8)  (d10, h9)    draws d11

A block id names the same tokens in the KV memories of both models. The newest features of each block are kept, for requests that
start after them. A copy of a block copies all. A block that was restored from host memory, disk or another server has no keys and
values of the head: a request gets no drafts if one of its full blocks lacks them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.memory import lazy_zeros
from quintet.executor.model_config.draft_heads import MAX_PENDING, NUM_FEATURES
from quintet.executor.models.eagle import EagleHead
from quintet.executor.models.mtp import MtpHead
from quintet.executor.ragged import Int, ranges
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.sequences import plan_of_rows
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.draft_draws import compute_and_draw
from quintet.executor.speculation.drafters import DraftRows
from quintet.executor.speculation.gram_index import Tokens
from quintet.executor.speculation.lengths import StepTime
from quintet.wire.config import DraftModelConfig
from quintet.wire.step import StepPlan

DraftHead = EagleHead | MtpHead
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A recorded layer of a head."""

    runner: ProgramRunner
    program: ModelProgram

    @property
    def input(self) -> torch.Tensor:
        """Features ``[max_tokens, width]`` of a step's tokens."""
        assert self.program.received_hidden is not None, "a head reads features"
        return self.program.received_hidden


class HeadDrafter:
    """A `quintet.executor.speculation.drafters.Drafter` with a head, its KV memory, and features."""

    def __init__(
        self,
        config: DraftModelConfig,
        head: DraftHead,
        layers: Sequence[HeadLayer],
        target: ModelProgram,
        num_blocks: int,
        tables: SlotTables,
        sampler: Sampler,
    ) -> None:
        """layers: of the head. target: of the served model, as ``tables`` and ``sampler``."""
        self._head, self._layers, self._target = head, layers, target
        self._sampler, self._tables = sampler, tables.of_group(config.group, config.model.kv)
        self._token_ids: Tokens = tables.token_ids.numpy()
        self._block_table, self._block_size = self._tables.block_table[0], config.model.kv.block_size
        self._max_tokens, width = layers[0].input.shape
        num_slots, num_layers = len(self._token_ids), len(layers)
        cpu, dtype = torch.device("cpu"), layers[0].input.dtype
        self._features = lazy_zeros((num_slots, NUM_FEATURES, width), dtype, cpu)
        """Features of the newest tokens of each slot, at their position modulo `NUM_FEATURES`."""
        self._last_hidden = lazy_zeros((num_slots, num_layers - 1, width), dtype, cpu)
        """Hidden states of each slot's last computed token after each layer but the last: features of the next token there."""
        self._block_features = lazy_zeros((num_blocks, num_layers, width), dtype, cpu)
        """Of each block, features of its newest token, and `_last_hidden` of its last computed token."""
        self._featured: Int = np.zeros(num_blocks, np.int64)
        """Number of tokens in each block up to that token; 0: none."""
        self._block_tokens: Int = np.zeros(num_blocks, np.int64)
        """Leading tokens of each block with keys and values of the head."""
        self._num_computed: Int = np.zeros(num_slots, np.int64)
        """Leading tokens of each slot with keys and values of the head, except after a gap."""
        self._has_gap: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """True where keys and values of a cached prefix are missing."""
        self._num_known: Int = np.zeros(num_slots, np.int64)
        """Leading tokens of each slot that the served model has computed."""
        self._first_featured: Int = np.zeros(num_slots, np.int64)
        """First token of each slot with kept features, if it is among the newest; -1: that before the first token."""
        self._keeps_tails = tables.kv.has_states
        """A request may continue in the partly filled block of an ended one."""
        self._token_map: Tokens | None = (
            None if head.token_map is None else head.token_map.numpy().astype(np.int32)
        )
        self._time = StepTime()

    output_cache = None
    reads_steps = True

    @property
    def step_time(self) -> tuple[float, float]:
        """See `Drafter.step_time`."""
        return self._time.fit()

    def end(self, slot: int, num_tokens: int) -> None:
        """See `Drafter.end`. Compute the newest tokens for a request that continues after them."""
        begin, known = int(self._num_computed[slot]), int(self._num_known[slot])
        if self._keeps_tails and begin < known and not self._has_gap[slot]:
            before = np.arange(begin - 1, known - 1)
            self._compute(slot, begin, self._features_of(np.full(len(before), slot), before))

    def note(self, plan: StepPlan) -> None:
        """See `Drafter.note`."""
        self._num_known[[row.slot for row in plan.new_rows]] = _UNKNOWN
        restored = np.frombuffer(plan.swaps_in, np.int32)[::2]
        self._block_tokens[restored] = self._featured[restored] = 0
        if plan.copies:
            self._layers[0].program.kv.copy(plan.copies)
            sources, targets = np.frombuffer(plan.copies, np.int32).reshape(-1, 2).T.astype(np.int64)
            self._block_tokens[targets], self._featured[targets] = (
                self._block_tokens[sources],
                self._featured[sources],
            )
            self._block_features[torch.from_numpy(targets)] = self._block_features[torch.from_numpy(sources)]

    def observe(self, num_tokens: int) -> torch.Tensor:
        """See `Drafter.observe`."""
        return torch.cat([hidden[:num_tokens] for hidden in self._target.aux_hidden], dim=1)

    def note_computed(
        self, slots: Int, starts: Int, counts: Int, num_valid: Int, hidden: torch.Tensor
    ) -> None:
        """See `Drafter.note_computed`. Keep the features of the rows' tokens; compute long rows."""
        rows, positions = ranges(starts, num_valid)
        offsets = np.cumsum(counts) - counts
        if len(positions) < len(hidden):
            hidden = hidden[torch.from_numpy(offsets[rows] + positions - starts[rows])]
        features = self._head.fused(hidden)
        ends = starts + num_valid
        # New requests, and those that continue after blocks of another. A row that starts in a copied block changes it.
        begins = starts > self._num_known[slots]
        in_copy = begins & (starts % self._block_size > 0)
        for row in np.flatnonzero(in_copy).tolist():
            self._begin(int(slots[row]), int(starts[row]))
        begins &= ~in_copy
        computed = np.where(begins, starts, self._num_computed[slots])
        self._reset_blocks(slots[rows], positions, positions >= computed[rows])
        self._keep_block_features(slots[rows], positions, features, positions == ends[rows] - 1)
        firsts = np.cumsum(num_valid) - num_valid
        must_compute = self._must_compute(computed, ends)
        # In this order: later rows may share blocks of earlier ones.
        for row in np.flatnonzero(begins | must_compute).tolist():
            slot, start, end = int(slots[row]), int(starts[row]), int(ends[row])
            if begins[row]:
                self._begin(slot, start)
            if not self._has_gap[slot] and self._must_compute(self._num_computed[slot], end):
                self._compute_row(slot, start, features[firsts[row] : firsts[row] + num_valid[row]])
        newest = positions >= ends[rows] - NUM_FEATURES
        places = torch.from_numpy(slots[rows][newest]), torch.from_numpy(positions[newest] % NUM_FEATURES)
        self._features[places] = features[torch.from_numpy(newest)]
        self._num_known[slots] = ends

    def num_missing(self, slots: Int, num_tokens: Int) -> Int:
        """See `Drafter.num_missing`."""
        missing: Int = np.maximum(num_tokens - 1 - self._num_computed[slots], 0)
        return missing

    def propose(self, rows: DraftRows) -> list[Tokens]:
        """See `Drafter.propose`."""
        slots, ends = rows.slots, rows.num_tokens
        begins = self._num_computed[slots]
        is_known = (self._num_known[slots] == ends - 1) & ~self._has_gap[slots]
        counts = np.where(is_known, rows.counts, 0)
        missing = np.where(is_known, ends - begins, 0)
        counts[np.cumsum(missing + len(self._layers) - 1) > self._max_tokens] = 0
        used = counts > 0
        slots, ends, begins, drafts = slots[used], ends[used], begins[used], counts[used]
        which, positions = ranges(begins, ends - begins)
        hidden = self._advance(slots, begins, ends, drafts, self._features_of(slots[which], positions - 1))
        for depth in range(len(self._layers), int(drafts.max(initial=0))):
            row = drafts > depth
            hidden = hidden[torch.from_numpy(row[drafts > depth - 1])]
            starts, ones = ends[row] + (depth - 1), np.ones(int(row.sum()), np.int64)
            hidden = self._step(-1, slots[row], starts, ones, ones > 0, hidden)
        columns = zip(rows.slots.tolist(), rows.num_tokens.tolist(), counts.tolist(), strict=True)
        return [self._token_ids[slot, end : end + count].copy() for slot, end, count in columns]

    def _begin(self, slot: int, start: int) -> None:
        """Begin after a prefix of ``start`` tokens in other requests' blocks, or in copies of them."""
        self._num_computed[slot] = self._num_known[slot] = start
        self._has_gap[slot], self._first_featured[slot] = False, start - 1
        self._last_hidden[slot] = 0.0
        if not start:
            return
        num_whole, rest = divmod(start, self._block_size)
        blocks = self._block_table[slot, : num_whole + (rest > 0)]
        last, in_last = int(blocks[-1]), rest or self._block_size
        self._has_gap[slot] = (self._block_tokens[blocks[:num_whole]] < self._block_size).any()
        if self._block_tokens[last] > in_last:
            self._block_tokens[last] = in_last
            self._block_features[last, 1:] = 0.0  # of a later token; drafts may be worse
        if self._featured[last] == self._block_tokens[last] == in_last:
            self._features[slot, (start - 1) % NUM_FEATURES] = self._block_features[last, 0]
        elif not self._take_features(slot, start, start - in_last + int(self._block_tokens[last])):
            self._has_gap[slot], self._first_featured[slot] = True, start
        newest = int(self._num_computed[slot]) - 1
        if newest >= 0:
            self._last_hidden[slot] = self._block_features[int(blocks[newest // self._block_size]), 1:]

    def _take_features(self, slot: int, start: int, begin: int) -> bool:
        """Copy the features of the tokens from ``begin`` - 1 to ``start`` - 1 from a slot with the same prefix, if any."""
        known, tokens = self._num_known, self._token_ids
        first = np.maximum(self._first_featured, known - NUM_FEATURES)
        for other in np.flatnonzero((known >= start) & (first < begin)).tolist():
            if other != slot and np.array_equal(tokens[other, :start], tokens[slot, :start]):
                self._features[slot], self._first_featured[slot] = self._features[other], int(first[other])
                self._num_computed[slot] = begin
                return True
        return False

    def _must_compute(self, computed: Int | int, ends: Int | int) -> NDArray[np.bool_]:
        """Return whether tokens must be computed now: there are many, or they end a block that others may share."""
        size = self._block_size
        return np.asarray((ends - computed > MAX_PENDING) | (ends // size * size > computed))

    def _reset_blocks(self, slots: Int, positions: Int, is_new: NDArray[np.bool_]) -> None:
        """Forget the former content of blocks at the first token that the served model has computed."""
        is_first = is_new & (positions % self._block_size == 0)
        blocks = self._block_table[slots[is_first], positions[is_first] // self._block_size]
        self._block_tokens[blocks] = 0

    def _keep_block_features(
        self, slots: Int, positions: Int, features: torch.Tensor, is_newest: NDArray[np.bool_]
    ) -> None:
        is_kept = is_newest | ((positions + 1) % self._block_size == 0)
        slots, positions = slots[is_kept], positions[is_kept]
        blocks = self._block_table[slots, positions // self._block_size].astype(np.int64)
        self._block_features[torch.from_numpy(blocks), 0] = features[torch.from_numpy(is_kept)]
        self._featured[blocks] = positions % self._block_size + 1

    def _features_of(self, slots: Int, positions: Int) -> torch.Tensor:
        """Return kept features ``[tokens, width]``; those before the first token are zeros."""
        found = self._features[torch.from_numpy(slots), torch.from_numpy(positions % NUM_FEATURES)]
        found[torch.from_numpy(positions < 0)] = 0.0
        return found

    def _compute_row(self, slot: int, start: int, features: torch.Tensor) -> None:
        """Compute the missing tokens of a row without drawing. features: of its tokens from ``start`` on."""
        begin = int(self._num_computed[slot])
        before = np.arange(begin - 1, start)
        kept = self._features_of(np.full(len(before), slot), before)
        self._compute(slot, begin, torch.cat((kept, features[:-1])))

    def _compute(self, slot: int, begin: int, features: torch.Tensor) -> None:
        """Compute the tokens from ``begin`` on. features: of the token before each of them."""
        end = begin + len(features)
        for first in range(begin, end, self._max_tokens):
            last = min(first + self._max_tokens, end)
            one = np.array([slot]), np.array([first]), np.array([last]), np.array([0])
            self._advance(*one, features[first - begin : last - begin])

    def _advance(
        self, slots: Int, begins: Int, ends: Int, drafts: Int, features: torch.Tensor
    ) -> torch.Tensor:
        """Compute the tokens ``[begins, ends)`` of each row with all layers, which draw up to ``drafts`` drafts.

        features: of the token before each of them, ``[tokens, width]``. Returns the last layer's hidden states of the newest
        tokens, of rows that it drew for.
        """
        if not len(slots):
            return features
        outputs: list[tuple[torch.Tensor, Int]] = []
        for number in range(len(self._layers)):
            draws = drafts > number
            counts = ends - begins + number * draws
            if number:
                features = self._shifted(
                    self._last_hidden[torch.from_numpy(slots), number - 1], *outputs[-1], counts
                )
            hidden = self._step(number, slots, begins, counts, draws, features)
            outputs.append((hidden, np.cumsum(counts) - counts))
        self._note_layers(slots, begins, ends, outputs[:-1])
        return hidden[torch.from_numpy((np.cumsum(counts) - 1)[draws])]

    @staticmethod
    def _shifted(before: torch.Tensor, hidden: torch.Tensor, firsts: Int, counts: Int) -> torch.Tensor:
        """Return features of each row's tokens: ``before`` of the token before the row, then ``hidden`` from ``firsts`` on."""
        rows, offsets = ranges(np.zeros_like(counts), counts)
        features = hidden[torch.from_numpy(firsts[rows] + np.maximum(offsets - 1, 0))]
        features[torch.from_numpy(offsets == 0)] = before
        return features

    def _note_layers(
        self, slots: Int, begins: Int, ends: Int, outputs: Sequence[tuple[torch.Tensor, Int]]
    ) -> None:
        """Note that the tokens ``[begins, ends)`` of each row have keys and values.

        outputs: hidden states after each layer but the last, and the index of each row's first token in them.
        """
        size, first = self._block_size, begins // self._block_size
        rows, positions = ranges(first, (ends - 1) // size + 1 - first)
        blocks = self._block_table[slots[rows], positions].astype(np.int64)
        block_ends = np.minimum(ends[rows], (positions + 1) * size)
        self._num_computed[slots] = ends
        self._block_tokens[blocks] = block_ends - positions * size
        for number, (hidden, firsts) in enumerate(outputs):
            of_blocks = torch.from_numpy(firsts[rows] + block_ends - begins[rows] - 1)
            self._block_features[torch.from_numpy(blocks), number + 1] = hidden[of_blocks]
            self._last_hidden[torch.from_numpy(slots), number] = hidden[
                torch.from_numpy(firsts + ends - begins - 1)
            ]

    def _step(
        self,
        number: int,
        slots: Int,
        starts: Int,
        counts: Int,
        draws: NDArray[np.bool_],
        features: torch.Tensor,
    ) -> torch.Tensor:
        """Compute ``counts`` tokens of each row with a layer. Where ``draws``, write the next token into the token table.

        features: ``[tokens, width]``. Returns the hidden states of all tokens, which the layer's next step overwrites.
        """
        began_s, layer = time.perf_counter(), self._layers[number]
        layer.input[: len(features)] = features
        rows = Rows(plan_of_rows(slots, starts, counts, draws))
        if not draws.any():
            layer.runner.forward(rows, self._tables)
            return layer.program.hidden[: len(features)]
        has_same_ids = self._token_map is None
        drawn = compute_and_draw(layer.runner, rows, self._tables, self._sampler, has_same_ids=has_same_ids)
        if self._token_map is not None:
            places = slots[draws], (starts + counts)[draws]
            self._token_ids[places] = self._token_map[np.frombuffer(drawn, np.int32)]
        self._time.note(int(counts.sum()), time.perf_counter() - began_s)
        return layer.program.hidden[: len(features)]
