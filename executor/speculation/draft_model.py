"""Drafts of a smaller model, which computes one token of all rows at a time.

The model reads the tokens, blocks and sampling settings of the slots. Its draw at a position uses the random number of
the served model's draw there (`quintet.executor.speculation.drafters`). So the two draws are likely to be equal, at every
temperature.

A block id names the same tokens in the KV memories of both models. Prefix hits and forks need no work here: a number per
block says how many of its tokens the draft model has computed. Keys and values that are missing are computed before drafts are
drawn:

    tokens           t0 … t31    t32 … t40 t41      t41 is the newest token
    KV of the model  computed    (missing)          the first step computes t32 … t41 and draws d42
                                                    further steps compute d42, d43, … and draw one draft each

Missing tokens are computed in steps of limited size. A row gets drafts once none is missing. Rows with a common prefix may
lack the same block: one of them computes it, the others wait for the next step.

A model with recurrent states has two per request: the *kept* one is after the computed tokens, the other one after the drafts:

    first step       reads the kept state, writes it             after t41
    further steps    read the kept one, then the other one       after d42, d43, …
                     write the other one

After the verification, the next first step reads the other state if all drafts in it became tokens. Else it reads the kept
one and computes the accepted tokens again. Prefixes in the cache have no states, so each request computes all its tokens.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from quintet.executor.kv_memory import KvMemory
from quintet.executor.model_config.state_specs import STATES_PER_REQUEST
from quintet.executor.ragged import Int, ranges
from quintet.executor.runner import Runner
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.sequences import plan_of_rows
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.drafters import Drafter, DraftRows, compute_and_draw
from quintet.executor.speculation.gram_index import Tokens
from quintet.wire.config import MAX_DRAFTS, DraftModelConfig, SchedulerConfig
from quintet.wire.step import StepPlan

MAX_STEP_TOKENS = 512
"""Limit of a draft model's step. A long prompt is computed over several steps, while other requests continue."""

_UNKNOWN = -1

_TILE = 16
"""Tokens of a block that the kernels write together: the first one clears those after it."""


def draft_tokens(limits: SchedulerConfig) -> int:
    """Return the limit of a draft model's step: at least one token of each request."""
    return max(min(limits.max_num_batched_tokens, MAX_STEP_TOKENS), limits.max_num_seqs)


class RequestStates:
    """Recurrent states of a draft model: `STATES_PER_REQUEST` of each request, of a limited number of requests."""

    def __init__(self, tables: SlotTables, num_states: int) -> None:
        """tables: of the draft model; their second group names the states."""
        self._table, self._is_used = tables.block_table[1], tables.is_used
        self._of_slot: Int = np.full(len(self._is_used), -1)
        self._all = np.arange(num_states // STATES_PER_REQUEST)

    def assign(self, slots: Int) -> NDArray[np.bool_]:
        """Assign states to these slots, as far as ended requests have left some. Return which slots have states."""
        self._of_slot[~self._is_used] = -1
        lacking = slots[self._of_slot[slots] < 0]
        if len(lacking):
            free = np.setdiff1d(self._all, self._of_slot)[: len(lacking)]
            self._of_slot[lacking[: len(free)]] = free
        return self._of_slot[slots] >= 0

    def use(self, slots: Int, reads_drafts: NDArray[np.bool_], *, writes_drafts: bool) -> None:
        """Choose the states of the next step of these slots: the kept ones, or those after drafts."""
        firsts = STATES_PER_REQUEST * self._of_slot[slots]
        self._table[slots, 0] = firsts + reads_drafts
        self._table[slots, 1] = firsts + writes_drafts


class DraftModel(Drafter):
    """A drafter with weights and KV memory."""

    def __init__(
        self,
        config: DraftModelConfig,
        runner: Runner,
        kv: KvMemory,
        max_tokens: int,
        vocab_size: int,
        tables: SlotTables,
        sampler: Sampler,
    ) -> None:
        """kv, max_tokens: of ``runner``. vocab_size, tables, sampler: of the served model."""
        super().__init__()
        self._runner, self._kv, self._sampler = runner, kv, sampler
        self._tables = tables.of_group(config.group, config.model.kv)
        self._states: RequestStates | None = None
        if kv.states is not None:
            self._tables.block_table = np.zeros((2, *tables.block_table.shape[1:]), np.int32)
            self._states = RequestStates(self._tables, len(kv.states.places[0]))
        self._group, self._block_size = config.group, config.model.kv.block_size
        self._token_ids: Tokens = tables.token_ids.numpy()
        self._block_table = self._tables.block_table[0]
        self._max_tokens, self._max_len = max_tokens, config.model.max_model_len
        self._vocab_size, self._target_vocab_size = config.model.vocab_size, vocab_size
        num_slots = len(self._token_ids)
        self._num_computed: Int = np.full(num_slots, _UNKNOWN, np.int64)
        """Leading tokens of each slot with keys and values, without drafts."""
        self._computed_drafts: Tokens = np.full((num_slots, MAX_DRAFTS), -1, np.int32)
        """Drafts with keys and values after those tokens; -1 after the last one."""
        self._block_tokens: Int = np.zeros(len(kv.places[0]), np.int64)
        """Leading tokens of each block with keys and values, without drafts."""

    def note(self, plan: StepPlan) -> None:
        """See `Drafter.note`. Blocks that the served model fills, copies or restores have no keys and values here."""
        if plan.new_rows:
            new_slots = [row.slot for row in plan.new_rows]
            self._num_computed[new_slots], self._computed_drafts[new_slots] = _UNKNOWN, -1
        if self._states is not None:
            self._note_blocks(plan)
            return
        if plan.blocks:
            begins = np.zeros(len(self._num_computed), np.int64)
            if plan.new_rows:
                slots, starts = np.frombuffer(plan.slots, np.int32), np.frombuffer(plan.starts, np.int32)
                begins[slots] = np.where(self._num_computed[slots] == _UNKNOWN, starts, 0)
            entries = np.frombuffer(plan.blocks, np.int32).reshape(-1, 4)
            entries = entries[entries[:, 1] == self._group]
            is_filled = (entries[:, 2] + 1) * self._block_size > begins[entries[:, 0]]
            self._block_tokens[entries[is_filled, 3]] = 0
        if plan.swaps_in:
            self._block_tokens[np.frombuffer(plan.swaps_in, np.int32)[::2]] = 0
        if plan.copies:
            self._block_tokens[np.frombuffer(plan.copies, np.int32)[1::2]] = 0

    def _note_blocks(self, plan: StepPlan) -> None:
        """Copy the plan's block entries and blocks: a request with states does not compute its tokens again."""
        if plan.blocks:
            entries = np.frombuffer(plan.blocks, np.int32).reshape(-1, 4)
            entries = entries[entries[:, 1] == self._group]
            self._block_table[entries[:, 0], entries[:, 2]] = entries[:, 3]
        if plan.copies:
            self._kv.copy(plan.copies)

    def num_missing(self, slots: Int, num_tokens: Int) -> Int:
        known = self._known(slots, num_tokens)
        missing: Int = num_tokens - 1 - known - self._num_matching(slots, known, num_tokens)
        return np.maximum(missing, 0)

    def propose(self, rows: DraftRows) -> list[Tokens]:
        slots, ends = rows.slots, rows.num_tokens
        known = self._known(slots, ends)
        begins = known + self._num_matching(slots, known, ends)
        counts = np.minimum(rows.counts, self._max_len - ends)
        is_able = (counts > 0) & self._has_words(slots, begins, ends)
        if self._states is not None:
            is_able[is_able] = self._states.assign(slots[is_able])
        missing = np.where(is_able, ends - begins, 0)
        order = np.argsort(missing, kind="stable")
        room = np.empty_like(missing)
        room[order] = self._max_tokens - (np.cumsum(missing[order]) - missing[order])
        computed = np.clip(room, 0, missing)
        if self._kv.spec.groups[0].layers:
            self._leave_to_others(slots, known, begins, computed, order)
        is_ready = (computed == missing) & (computed > 0)
        if self._states is not None:
            rest = np.where(is_ready, 0, (begins + computed) % _TILE)
            computed -= np.where(rest < computed, rest, 0)
            self._states.use(slots[computed > 0], (begins > known)[computed > 0], writes_drafts=False)
        self._step(slots, begins, computed, is_ready)
        used = computed > 0
        self._note_computed(slots[used], known[used], (begins + computed)[used])
        counts[~is_ready] = 0
        for depth in range(1, int(counts.max(initial=0))):
            is_drafting = counts > depth
            if self._states is not None:
                self._states.use(slots[is_drafting], np.array(depth > 1), writes_drafts=True)
            self._step(slots, ends + (depth - 1), is_drafting.astype(np.int64), is_drafting)
        return [
            self._proposal(slot, end, count)
            for slot, end, count in zip(slots.tolist(), ends.tolist(), counts.tolist(), strict=True)
        ]

    def _proposal(self, slot: int, end: int, count: int) -> Tokens:
        """Return the drafts of a row from the token table, and note those with keys and values: all but the last."""
        drafts = self._token_ids[slot, end : end + count].copy()
        self._computed_drafts[slot, : max(0, count - 1)] = drafts[:-1]
        unknown = np.flatnonzero(drafts >= self._target_vocab_size)
        return drafts[: unknown[0]] if len(unknown) else drafts

    def _known(self, slots: Int, ends: Int) -> Int:
        """Return the number of leading tokens with keys and values, of this request or of others with its prefix.

        The newest token is never among them.
        """
        size = self._block_size
        known = self._num_computed[slots]
        if self._states is not None:
            return np.maximum(known, 0)
        first = np.maximum(known, 0) // size
        in_first = self._block_tokens[self._block_table[slots, first]]
        is_stale = (known == _UNKNOWN) | (first * size + in_first > known)
        for row in np.flatnonzero(is_stale).tolist():
            blocks = self._block_table[slots[row], first[row] : (ends[row] - 2) // size + 1]
            computed = self._block_tokens[blocks]
            num_whole = int(np.argmin(np.append(computed, 0) == size))
            found = size * (first[row] + num_whole) + int(computed[num_whole : num_whole + 1].sum())
            known[row] = min(found, ends[row] - 1)
            self._computed_drafts[slots[row]] = -1
        return known

    def _leave_to_others(self, slots: Int, known: Int, begins: Int, counts: Int, order: Int) -> None:
        """Lower ``counts`` so that no two rows compute tokens of one block; the first row in this order keeps it."""
        first = known // self._block_size
        last = (begins + counts - 1) // self._block_size
        num_blocks = np.where(counts > 0, last + 1 - first, 0)
        which, positions = ranges(first[order], num_blocks[order])
        rows = order[which]
        _, kept = np.unique(self._block_table[slots[rows], positions], return_index=True)
        is_taken = np.ones(len(rows), np.bool_)
        is_taken[kept] = False
        most = np.maximum(0, positions * self._block_size - begins[rows])
        np.minimum.at(counts, rows[is_taken], most[is_taken])

    def _num_matching(self, slots: Int, known: Int, ends: Int) -> Int:
        """Return the number of drafts with keys and values that became tokens. The newest token is never among them."""
        positions = known[:, None] + np.arange(MAX_DRAFTS)
        tokens = self._token_ids[slots[:, None], np.minimum(positions, self._token_ids.shape[1] - 1)]
        is_equal = (tokens == self._computed_drafts[slots]) & (positions < ends[:, None] - 1)
        matching: Int = np.cumprod(is_equal, axis=1, dtype=np.int64).sum(axis=1)
        if self._states is not None:  # the state is after all of them
            matching[matching < (self._computed_drafts[slots] >= 0).sum(axis=1)] = 0
        return matching

    def _has_words(self, slots: Int, begins: Int, ends: Int) -> NDArray[np.bool_]:
        """Return whether the model's vocabulary has all missing tokens of each row."""
        if self._vocab_size >= self._target_vocab_size:
            return np.ones(len(slots), np.bool_)
        columns = zip(slots.tolist(), begins.tolist(), ends.tolist(), strict=True)
        return np.array([self._token_ids[slot, a:b].max() < self._vocab_size for slot, a, b in columns])

    def _note_computed(self, slots: Int, known: Int, ends: Int) -> None:
        """Note that the tokens ``[known, ends)`` of each row have keys and values."""
        self._num_computed[slots] = ends
        self._computed_drafts[slots] = -1
        size, first = self._block_size, known // self._block_size
        rows, positions = ranges(first, (ends - 1) // size + 1 - first)
        blocks = self._block_table[slots[rows], positions]
        self._block_tokens[blocks] = np.minimum(ends[rows] - positions * size, size)

    def _step(self, slots: Int, starts: Int, counts: Int, draws: NDArray[np.bool_]) -> None:
        """Compute ``counts`` tokens of each row. Where ``draws``, write the next token into the token table."""
        used = counts > 0
        if not used.any():
            return
        began_s = time.perf_counter()
        rows = Rows(plan_of_rows(slots[used], starts[used], counts[used], draws[used]))
        has_same_ids = self._vocab_size == self._target_vocab_size
        compute_and_draw(self._runner, rows, self._tables, self._sampler, has_same_ids=has_same_ids)
        self._time.note(int(counts.sum()), time.perf_counter() - began_s)
