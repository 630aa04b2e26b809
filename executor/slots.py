"""The slot tables: the executor's state of each running request, one fixed row per slot; and the rows of a plan.

Only plans change them: freed slots first, then new rows, then block entries. Block ids and lengths are on the host,
which computes indexes from them. Token ids are on the device: the sampler writes drawn tokens there, so a plan can
refer to a token before the host knows it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.memory import lazy_zeros
from quintet.executor.ragged import Int, ranges
from quintet.wire.kv_spec import KvSpec
from quintet.wire.model_files import AdapterConfig
from quintet.wire.step import StepPlan


class Rows:
    """A plan's rows as host columns, int64[R], each computed on first use: most steps use few."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    @cached_property
    def slots(self) -> Int:
        """Each row's slot."""
        return np.frombuffer(self.plan.slots, np.int32).astype(np.int64)

    @cached_property
    def starts(self) -> Int:
        """The position of each row's first token."""
        return np.frombuffer(self.plan.starts, np.int32).astype(np.int64)

    @cached_property
    def counts(self) -> Int:
        """Tokens of each row."""
        return np.frombuffer(self.plan.counts, np.int32).astype(np.int64)

    @cached_property
    def offsets(self) -> Int:
        """Index of each row's first token among the step's."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def sampling(self) -> Int:
        """int64[S]: the row of each drawn token. A row draws after each of its last ``samples`` tokens."""
        return self._draws[0]

    @cached_property
    def draw_positions(self) -> Int:
        """int64[S]: the position of each drawn token."""
        return self._draws[1]

    @cached_property
    def draw_tokens(self) -> Int:
        """int64[S]: the index, among the step's tokens, of the token before each draw."""
        rows, positions = self._draws
        return self.offsets[rows] + positions - self.starts[rows] - 1

    @cached_property
    def _draws(self) -> tuple[Int, Int]:
        samples = np.frombuffer(self.plan.samples, np.uint8)
        if samples.max(initial=0) > 1:
            num_draws = samples.astype(np.int64)
            return ranges(self.starts + self.counts - num_draws + 1, num_draws)
        rows = np.flatnonzero(samples)
        return rows, self.starts[rows] + self.counts[rows]


class SlotTables:
    """Token table, block table and per-slot fields of running requests."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        kv: KvSpec,
        device: torch.device,
        token_ids: torch.Tensor | None = None,
        adapters: Sequence[AdapterConfig] = (),
    ) -> None:
        """token_ids: an existing int32[max_num_seqs, max_model_len + 1] on ``device``, to share."""
        self.device = device
        self.kv = kv
        # One extra column: a plan made one step past a request's end may write there.
        shape = (max_num_seqs, max_model_len + 1)
        self.token_ids = lazy_zeros(shape, torch.int32, device) if token_ids is None else token_ids
        self.block_table: NDArray[np.int32] = np.zeros(
            (len(kv.groups), max_num_seqs, max(2, -(-(max_model_len + 1) // kv.block_size))), np.int32
        )
        """[groups, slots, positions]: see `quintet.wire.kv_spec.KvGroup`."""
        self.num_prompt_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.num_embedded: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        """Number of leading prompt positions with input embeddings; their token ids are unused."""
        self.is_used: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.generations: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        """Generation of the slot's request, or of its last one."""
        self.adapters: NDArray[np.int32] = np.zeros(max_num_seqs, np.int32)
        """Index of the request's adapter plus 1; 0 without one."""
        self._adapter_numbers = {b"": 0} | {each.digest: n for n, each in enumerate(adapters, 1)}

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's deltas to all tables."""
        self.note(plan)
        for row in plan.new_rows:
            tokens = torch.frombuffer(bytearray(row.token_ids), dtype=torch.int32)
            self.token_ids[row.slot, : len(tokens)] = tokens

    def note(self, plan: StepPlan) -> None:
        """Apply the plan's deltas to the host tables only; the caller copies new rows' tokens to the device."""
        if plan.freed:
            self.is_used[np.frombuffer(plan.freed, np.int32)] = False
        for row in plan.new_rows:
            self.num_prompt_tokens[row.slot] = row.num_prompt_tokens
            self.num_embedded[row.slot] = row.num_embedded
            self.is_used[row.slot], self.generations[row.slot] = True, row.generation
            self.adapters[row.slot] = self._adapter_numbers[row.adapter]
        if plan.blocks:
            entries = np.frombuffer(plan.blocks, np.int32).reshape(-1, 4)
            self.block_table[entries[:, 1], entries[:, 0], entries[:, 2]] = entries[:, 3]

    def of_group(self, group: int, kv: KvSpec) -> SlotTables:
        """Return the tables of another model that uses the blocks of this group in all layers. Both share their memory."""
        assert len(kv.groups) == 1 and kv.block_size == self.kv.block_size, (kv, self.kv)
        tables = copy.copy(self)
        tables.kv, tables.block_table = kv, self.block_table[group : group + 1]
        return tables

    def on_host(self) -> SlotTables:
        """Return the tables with a token table of their own, empty and on the host. The others are shared."""
        tables = copy.copy(self)
        tables.device = torch.device("cpu")
        tables.token_ids = lazy_zeros(self.token_ids.shape, torch.int32, tables.device)
        return tables

    def continue_states(self, slot: int) -> bytes:
        """Make a slot's next tokens continue from its latest states; return the block entries in plan format."""
        entries = []
        for index, group in enumerate(self.kv.groups):
            if group.is_state:
                self.block_table[index, slot, 0] = self.block_table[index, slot, 1]
                entries.append((slot, index, 0, self.block_table[index, slot, 1]))
        return np.array(entries, np.int32).tobytes()

    def generation(self, slot: int) -> int | None:
        """Return the generation of the slot's request; None for a free slot."""
        return int(self.generations[slot]) if self.is_used[slot] else None

    @property
    def num_active_slots(self) -> int:
        return int(np.count_nonzero(self.is_used))

    def reset(self) -> None:
        """Free every slot. Later requests overwrite its tokens and blocks."""
        self.is_used[:] = False
