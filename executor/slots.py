"""The slot tables: what the executor knows of each running request, one row per slot that never moves.

Only plans change them: freed slots first, then new rows, then block entries. Block ids and lengths stay on the host,
which computes indexes from them; token values live on the device, where the sampler writes what it draws, so that a
plan made before a token was known finds it there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.memory import lazy_zeros, to_device
from quintet.wire.kv_spec import KvSpec
from quintet.wire.step import StepPlan


class SlotTables:
    """Token table, block table and the facts about each slot's tenant."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        kv: KvSpec,
        device: torch.device,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        """token_ids: int32[max_num_seqs, max_model_len + 1] on ``device``, where somebody else has them already."""
        self.device = device
        self.kv = kv
        # One column more than a request can have: a plan made one step too far may write there.
        shape = (max_num_seqs, max_model_len + 1)
        self.token_ids = lazy_zeros(shape, torch.int32, device) if token_ids is None else token_ids
        self.block_table: NDArray[np.int32] = np.zeros(
            (len(kv.groups), max_num_seqs, max(2, -(-(max_model_len + 1) // kv.block_size))), np.int32
        )
        """[groups, slots, positions]: see `quintet.wire.kv_spec.KvGroup`."""
        self.num_prompt_tokens: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.num_embedded: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        """Of these, so many at the beginning are vectors: their ids mean nothing."""
        self.has_tenant: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.generations: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        """Of the tenant, or of the last one."""

    def apply(self, plan: StepPlan) -> None:
        """Bring the tables up to the plan."""
        self.note(plan)
        for row in plan.new_rows:
            tokens = np.frombuffer(row.token_ids, np.int32)
            self.token_ids[row.slot, : len(tokens)] = to_device(tokens.copy(), self.device)

    def note(self, plan: StepPlan) -> None:
        """Bring what the host keeps up to the plan; new rows' tokens reach the device another way."""
        if plan.freed:
            self.has_tenant[np.frombuffer(plan.freed, np.int32)] = False
        for row in plan.new_rows:
            self.num_prompt_tokens[row.slot] = row.num_prompt_tokens
            self.num_embedded[row.slot] = row.num_embedded
            self.has_tenant[row.slot], self.generations[row.slot] = True, row.generation
        if plan.blocks:
            entries = np.frombuffer(plan.blocks, np.int32).reshape(-1, 4)
            self.block_table[entries[:, 1], entries[:, 0], entries[:, 2]] = entries[:, 3]

    def go_on(self, slot: int) -> bytes:
        """Let a slot's next tokens go on from where its last ones leave its states; return the entries, as plans have them."""
        entries = []
        for index, group in enumerate(self.kv.groups):
            if group.is_state:
                self.block_table[index, slot, 0] = self.block_table[index, slot, 1]
                entries.append((slot, index, 0, self.block_table[index, slot, 1]))
        return np.array(entries, np.int32).tobytes()

    def generation(self, slot: int) -> int | None:
        """Return which tenant the slot has; None for no one."""
        return int(self.generations[slot]) if self.has_tenant[slot] else None

    @property
    def num_tenants(self) -> int:
        """Slots that have a tenant."""
        return int(np.count_nonzero(self.has_tenant))

    def reset(self) -> None:
        """Forget every tenant. What tokens and blocks they had is overwritten by the next ones."""
        self.has_tenant[:] = False
