"""Drafts of a head: an EAGLE head, or a multi-token prediction layer. It reads hidden states of the served model.

The head computes token ``t[i]`` from its embedding and features of the token before it, and draws ``t[i + 1]``:

    served model has computed   t0 … t7 t8                 t9 is its newest draw
    features known              f0 … f7 f8
    first step of the head      … (t8, f7) (t9, f8)        draws d10, with hidden state h9
    second step                 (d10, h9)                  draws d11, and so on

Features are kept like keys and values, in the blocks of their tokens. The head computes tokens only when drafts are needed, so
requests without drafts cost it nothing. The first token has features of zeros.

Of several layers, each draws one more draft. Features of a layer are the hidden states of the layer before it, also of the
prompt. So each layer computes all tokens, and the drafts before its own; the last layer draws the remaining drafts:

    first layer         … (t8, f7)  (t9, f8)               draws d10, with hidden states … h8 h9
    second layer        … (t8, h7)  (t9, h8)  (d10, h9)    draws d11

A block id names the same tokens in the KV memories of both models. Requests may share whole blocks: the first one that needs
drafts computes them, and the others use them. The copy of a block has its features, keys and values too. A block from host
memory, disk or another server has no features: a request gets no drafts if the head has to compute tokens of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.kv_memory import KvMemory
from quintet.executor.memory import Bits, bits_of, from_bits, lazy_zeros
from quintet.executor.models.draft_heads import EagleHead, MtpHead
from quintet.executor.ragged import Int, ranges
from quintet.executor.runner import Runner
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.sequences import plan_of_rows
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.drafters import Drafter, DraftRows, compute_and_draw
from quintet.executor.speculation.gram_index import Tokens
from quintet.wire.config import DraftModelConfig
from quintet.wire.step import StepPlan

DraftHead = EagleHead | MtpHead
_UNKNOWN = -1

MAX_TOGETHER = 32
"""Maximum missing tokens of a request, besides the newest one, that are computed together with those of others."""


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A layer of a head, ready for steps."""

    runner: Runner
    kv: KvMemory
    """Common to all layers."""
    input: torch.Tensor
    """Features ``[max_tokens, width]`` of a step's tokens."""
    output: torch.Tensor
    """Hidden states ``[max_tokens, width]`` of a step's tokens after the layer."""

    @staticmethod
    def of(runner: ProgramRunner, program: ModelProgram) -> HeadLayer:
        """Return a recorded layer."""
        assert program.received_hidden is not None, "a head reads features"
        return HeadLayer(runner, program.kv, program.received_hidden, program.hidden)


class HeadDrafter(Drafter):
    """A drafter with a head, its KV memory, and features."""

    reads_steps = True

    def __init__(
        self,
        config: DraftModelConfig,
        head: DraftHead,
        layers: Sequence[HeadLayer],
        target: ModelProgram | None,
        num_blocks: int,
        tables: SlotTables,
        sampler: Sampler,
        bits: Callable[[torch.Tensor], Bits] = bits_of,
    ) -> None:
        """layers: of the head. target: of the served model, as ``tables`` and ``sampler``; None if steps are not observed.

        bits: view of a tensor on the device of the layers.
        """
        super().__init__()
        self._head, self._layers, self._target, self._bits = head, layers, target, bits
        self._aux_hidden: tuple[Sequence[torch.Tensor], list[Bits]] = (), []
        """Hidden states of the served model that the head reads."""
        self._sampler, self._tables = sampler, tables.of_group(config.group, config.model.kv)
        self._token_ids: Tokens = tables.token_ids.numpy()
        self._block_table, self._block_size = self._tables.block_table[0], config.model.kv.block_size
        self._max_tokens, width = layers[0].input.shape
        num_slots, num_layers = len(self._token_ids), len(layers)
        device, self._dtype = layers[0].input.device, layers[0].input.dtype
        self._inputs = [bits(layer.input) for layer in layers]
        self._outputs = [bits(layer.output) for layer in layers]
        """Hidden states ``[max_tokens, width]`` of a step's tokens after each layer."""
        features = lazy_zeros((num_blocks * self._block_size, width), self._dtype, device)
        self._features = bits(features)
        """Features of the tokens of all blocks."""
        self._featured: Int = np.zeros(num_blocks, np.int64)
        """Leading tokens of each block with features."""
        self._computed: Int = np.zeros(num_blocks, np.int64)
        """Leading tokens of each block with keys and values of the head."""
        self._block_hidden = bits(lazy_zeros((num_blocks, num_layers - 1, width), self._dtype, device))
        """Hidden states of the last of them after each layer but the last: features of the next token there."""
        self._num_computed: Int = np.zeros(num_slots, np.int64)
        """Leading tokens of each slot with keys and values of the head. Other requests may have computed more of whole blocks."""
        self._num_known: Int = np.zeros(num_slots, np.int64)
        """Leading tokens of each slot that the served model has computed."""
        self._has_gap: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """True where features of tokens to compute are missing."""
        self._token_map: Tokens | None = (
            None if head.token_map is None else head.token_map.cpu().numpy().astype(np.int32)
        )

    def note(self, plan: StepPlan) -> None:
        if plan.new_rows:
            self._num_known[[row.slot for row in plan.new_rows]] = _UNKNOWN
        if plan.swaps_in:
            restored = np.frombuffer(plan.swaps_in, np.int32)[::2]
            self._computed[restored] = self._featured[restored] = 0
        if plan.copies:
            self._layers[0].kv.copy(plan.copies)
            sources, targets = np.frombuffer(plan.copies, np.int32).reshape(-1, 2).T
            by_block = self._features.reshape(len(self._computed), -1)
            for column in (self._computed, self._featured, by_block, self._block_hidden):
                column[targets] = column[sources]

    def observe(self, num_tokens: int) -> Bits:
        assert self._target is not None, "steps are not observed"
        tensors = self._target.aux_hidden
        if tensors is not self._aux_hidden[0]:  # with pipeline stages, in each step
            self._aux_hidden = tensors, [bits_of(each) for each in tensors]
        first, *others = (each[:num_tokens] for each in self._aux_hidden[1])
        return np.concatenate((first, *others), axis=1) if others else first

    def note_computed(self, slots: Int, starts: Int, counts: Int, num_valid: Int, hidden: Bits) -> None:
        """See `Drafter.note_computed`. Keep the features of the rows' tokens."""
        rows, positions = ranges(starts, num_valid)
        if len(positions) < len(hidden):
            offsets = np.cumsum(counts) - counts
            hidden = hidden[offsets[rows] + positions - starts[rows]]
        self._keep_features(slots[rows], positions, from_bits(hidden, self._dtype))
        self._note_rows(slots, starts, num_valid)

    def _keep_features(self, slots: Int, positions: Int, hidden: torch.Tensor) -> None:
        """Keep the features of tokens. hidden: of the served model, ``[tokens, width]``."""
        features = self._head.fused(hidden)
        assert features.dtype is self._dtype, features.dtype
        self._features[self._places(slots, positions)] = self._bits(features)

    def _note_rows(self, slots: Int, starts: Int, num_valid: Int) -> None:
        """Note that these tokens of each row have features."""
        # New requests, and those that continue after blocks of another. A row that starts in a copied block changes it; other
        # rows may begin after blocks of this step.
        begins = np.flatnonzero(starts > self._num_known[slots])
        in_copy = starts[begins] % self._block_size > 0
        for row in begins[in_copy].tolist():
            self._begin(int(slots[row]), int(starts[row]))
        begins = begins[~in_copy]
        self._num_computed[slots[begins]] = starts[begins]
        self._note_blocks(slots, starts, starts + num_valid)
        for row in begins.tolist():
            self._begin(int(slots[row]), int(starts[row]))
        self._num_known[slots] = starts + num_valid

    def num_missing(self, slots: Int, num_tokens: Int) -> Int:
        ends, has_drafts = num_tokens - 1, self._gets_drafts(slots, num_tokens)
        for row in np.flatnonzero(has_drafts & self._has_whole_block(slots, ends)).tolist():
            self._num_computed[slots[row]] = self._num_shared(int(slots[row]), int(ends[row]))
        missing: Int = np.where(has_drafts, np.maximum(ends - self._num_computed[slots], 0), 0)
        return missing

    def propose(self, rows: DraftRows) -> list[Tokens]:
        """See `Drafter.propose`. A long text is computed over several steps; its request gets no drafts until the last one."""
        slots, ends = rows.slots, rows.num_tokens
        gets_drafts = self._gets_drafts(slots, ends)
        counts, room = np.where(gets_drafts, rows.counts, 0), self._max_tokens
        is_long = self._has_whole_block(slots, ends - 1) | (
            ends - 1 - self._num_computed[slots] > MAX_TOGETHER
        )
        for number in np.flatnonzero(gets_drafts & is_long).tolist():
            room -= self._compute(int(slots[number]), int(ends[number]) - 1, room)
        begins = self._num_computed[slots]
        counts[is_long & (begins < ends - 1)] = 0
        missing = np.where(counts > 0, ends - begins, 0)
        counts[np.cumsum(missing + len(self._layers) - 1) > self._max_tokens] = 0
        used = counts > 0
        slots, ends, begins, drafts = slots[used], ends[used], begins[used], counts[used]
        which, positions = ranges(begins, ends - begins)
        hidden = self._advance(slots, begins, ends, drafts, self._features_before(slots[which], positions))
        for depth in range(len(self._layers), int(drafts.max(initial=0))):
            row = drafts > depth
            hidden = hidden[row[drafts > depth - 1]]
            starts, ones = ends[row] + (depth - 1), np.ones(int(row.sum()), np.int64)
            hidden = self._step(-1, slots[row], starts, ones, ones > 0, hidden)
        columns = zip(rows.slots.tolist(), rows.num_tokens.tolist(), counts.tolist(), strict=True)
        return [self._token_ids[slot, end : end + count].copy() for slot, end, count in columns]

    def _gets_drafts(self, slots: Int, num_tokens: Int) -> NDArray[np.bool_]:
        """Return whether all features are known that drafts of these slots need."""
        found: NDArray[np.bool_] = (self._num_known[slots] == num_tokens - 1) & ~self._has_gap[slots]
        return found

    def _has_whole_block(self, slots: Int, ends: Int) -> NDArray[np.bool_]:
        """Return whether a whole block before ``ends`` has missing tokens; others may share it."""
        is_whole: NDArray[np.bool_] = ends // self._block_size * self._block_size > self._num_computed[slots]
        return is_whole

    def _begin(self, slot: int, start: int) -> None:
        """Begin after a prefix of ``start`` tokens in other requests' blocks, or in copies of them."""
        self._num_known[slot], self._num_computed[slot], self._has_gap[slot] = start, 0, False
        if not start:
            return
        size = self._block_size
        blocks = self._block_table[slot, : (start - 1) // size + 1]
        lengths = np.full(len(blocks), size)
        lengths[-1] -= -start % size
        if self._computed[blocks[-1]] > lengths[-1]:
            self._computed[blocks[-1]] = lengths[-1]
            self._block_hidden[blocks[-1]] = 0  # of a later token; drafts may be worse
        computed = self._num_computed[slot] = self._num_shared(slot, start)
        first = max(0, computed - 1) // size
        self._has_gap[slot] = (self._featured[blocks[first:]] < lengths[first:]).any()

    def _num_shared(self, slot: int, end: int) -> int:
        """Return how many of the tokens before ``end`` have keys and values, whichever request computed them."""
        size = self._block_size
        computed = np.append(self._computed[self._block_table[slot, : (end - 1) // size + 1]], 0)
        num_whole = int(np.argmin(computed == size))
        return min(num_whole * size + int(computed[num_whole]), end)

    def _note_blocks(self, slots: Int, starts: Int, ends: Int) -> None:
        """Note that the served model has computed the tokens ``[starts, ends)`` of each row: they have features.

        Their blocks may have keys and values of former tokens.
        """
        size, first = self._block_size, starts // self._block_size
        rows, positions = ranges(first, (ends - 1) // size + 1 - first)
        blocks, begins = self._block_table[slots[rows], positions], positions * size
        is_continued = self._featured[blocks] >= starts[rows] - begins
        self._featured[blocks] = np.where(is_continued, np.minimum(ends[rows] - begins, size), 0)
        self._computed[blocks] = np.clip(self._num_computed[slots[rows]] - begins, 0, size)

    def _places(self, slots: Int, positions: Int) -> Int:
        """Return the indices of tokens in `_features`."""
        blocks, offsets = np.divmod(positions, self._block_size)
        places: Int = self._block_table[slots, blocks].astype(np.int64) * self._block_size + offsets
        return places

    def _features_before(self, slots: Int, positions: Int) -> Bits:
        """Return the features ``[tokens, width]`` of the token before each of these; zeros before the first token."""
        found = self._features[self._places(slots, np.maximum(positions - 1, 0))]
        found[positions == 0] = 0
        return found

    def _compute(self, slot: int, end: int, most: int) -> int:
        """Compute up to ``most`` missing tokens before ``end`` without drawing; return their number."""
        begin = self._num_shared(slot, end)
        end = min(end, begin + most)
        if begin < end:
            positions = np.arange(begin, end)
            one = np.array([slot]), np.array([begin]), np.array([end]), np.array([0])
            self._advance(*one, self._features_before(np.full(end - begin, slot), positions))
        self._num_computed[slot] = end
        return end - begin

    def _advance(self, slots: Int, begins: Int, ends: Int, drafts: Int, features: Bits) -> Bits:
        """Compute the tokens ``[begins, ends)`` of each row with all layers, which draw up to ``drafts`` drafts.

        features: of the token before each of them, ``[tokens, width]``. Returns the last layer's hidden states of the newest
        tokens, of rows that it drew for.
        """
        if not len(slots):
            return features
        outputs: list[tuple[Bits, Int]] = []
        for number in range(len(self._layers)):
            draws = drafts > number
            counts = ends - begins + number * draws
            if number:
                features = self._shifted(self._hidden_before(slots, begins, number), *outputs[-1], counts)
            hidden = self._step(number, slots, begins, counts, draws, features)
            outputs.append((hidden, np.cumsum(counts) - counts))
        self._note_layers(slots, begins, ends, outputs[:-1])
        newest: Bits = hidden[(np.cumsum(counts) - 1)[draws]]
        return newest

    def _hidden_before(self, slots: Int, begins: Int, number: int) -> Bits:
        """Return features for a layer after the first: of the token before each row, zeros before the first token."""
        blocks = self._block_table[slots, np.maximum(begins - 1, 0) // self._block_size]
        found: Bits = self._block_hidden[blocks, number - 1]
        found[begins == 0] = 0
        return found

    @staticmethod
    def _shifted(before: Bits, hidden: Bits, firsts: Int, counts: Int) -> Bits:
        """Return features of each row's tokens: ``before`` of the token before the row, then ``hidden`` from ``firsts`` on."""
        rows, offsets = ranges(np.zeros_like(counts), counts)
        features: Bits = hidden[firsts[rows] + np.maximum(offsets - 1, 0)]
        features[offsets == 0] = before
        return features

    def _note_layers(self, slots: Int, begins: Int, ends: Int, outputs: Sequence[tuple[Bits, Int]]) -> None:
        """Note that the tokens ``[begins, ends)`` of each row have keys and values.

        outputs: hidden states after each layer but the last, and the index of each row's first token in them.
        """
        size, first = self._block_size, begins // self._block_size
        rows, positions = ranges(first, (ends - 1) // size + 1 - first)
        blocks = self._block_table[slots[rows], positions]
        block_ends = np.minimum(ends[rows], (positions + 1) * size)
        self._num_computed[slots] = ends
        self._computed[blocks] = block_ends - positions * size
        for number, (hidden, firsts) in enumerate(outputs):
            self._block_hidden[blocks, number] = hidden[firsts[rows] + block_ends - begins[rows] - 1]

    def _step(
        self,
        number: int,
        slots: Int,
        starts: Int,
        counts: Int,
        draws: NDArray[np.bool_],
        features: Bits,
    ) -> Bits:
        """Compute ``counts`` tokens of each row with a layer. Where ``draws``, write the next token into the token table.

        features: ``[tokens, width]``. Returns the hidden states of all tokens, which the layer's next step overwrites.
        """
        began_s, layer = time.perf_counter(), self._layers[number]
        self._inputs[number][: len(features)] = features
        rows = Rows(plan_of_rows(slots, starts, counts, draws))
        if not draws.any():
            layer.runner.forward(rows, self._tables)
        else:
            has_same_ids = self._token_map is None
            drawn = compute_and_draw(
                layer.runner, rows, self._tables, self._sampler, has_same_ids=has_same_ids
            )
            if self._token_map is not None:
                tokens = self._token_map[np.frombuffer(drawn, np.int32)]
                self._put_tokens(slots[draws], (starts + counts)[draws], tokens)
        self._time.note(int(counts.sum()), time.perf_counter() - began_s)
        return self._outputs[number][: len(features)]

    def _put_tokens(self, slots: Int, positions: Int, tokens: Tokens) -> None:
        """Write tokens into the token table."""
        self._token_ids[slots, positions] = tokens
