"""Draws the step's tokens and writes them into the token table."""

from __future__ import annotations

import torch

from quintet.executor.batch import Rows
from quintet.executor.memory import to_device
from quintet.executor.models.model import CausalModel
from quintet.executor.ops.table import Ops
from quintet.executor.slots import SlotTables
from quintet.wire.step import NewRow, PromptLogprobs, TokenLogprobs


class Sampler:
    """One per worker."""

    def __init__(self, max_num_seqs: int, tables: SlotTables, ops: Ops) -> None:
        self._tables = tables
        self._ops = ops

    def admit(self, row: NewRow) -> None:
        """Note what a new tenant asks for."""

    def draw(self, rows: Rows, logits: torch.Tensor) -> tuple[torch.Tensor, list[TokenLogprobs]]:
        """Return the drawn tokens int64[S] and the log-probabilities asked for."""
        drawn = self._ops.argmax(logits)
        slots = rows.slots[rows.sampling]
        ends = (rows.starts + rows.counts)[rows.sampling]
        device = self._tables.device
        self._tables.token_ids[to_device(slots, device), to_device(ends, device)] = drawn.to(torch.int32)
        return drawn, []

    def prompt_logprobs(self, rows: Rows, hidden: torch.Tensor, model: CausalModel) -> list[PromptLogprobs]:
        """Return log-probabilities of prompt tokens that this step made known."""
        return []
