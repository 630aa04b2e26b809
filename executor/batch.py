"""Build a model's flat input tensors from a plan and the slot tables. No loop over rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.backends.cpu.ops.paged_attention import MAX_FOLDED_TOKENS, AttentionBucket
from quintet.executor.backends.cpu.ops.states import StateRows
from quintet.executor.memory import to_device
from quintet.executor.models.layers.attention import AttentionWindow, Heads
from quintet.executor.ragged import Int, ranges
from quintet.executor.slots import Rows, SlotTables

GATHER_BYTES = 32 << 20
"""Limit on a bucket's gathered keys and values, so that they fit the processor's caches."""

MAX_PADDING = 1.25
"""Rows of one token share a bucket while padding to the longest costs at most this factor."""


View = tuple[int, AttentionWindow, Heads]
"""A layer's view: block table group, visible tokens, heads."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of a model's forward pass: ``T`` tokens, concatenated row by row."""

    num_tokens: int
    token_ids: torch.Tensor
    """int32[T]"""
    positions: torch.Tensor
    """int64[T]"""
    prompts: torch.Tensor | None
    """int64[T]: prompt length of the token's row; see `quintet.executor.models.layers.rope`."""
    blocks: tuple[torch.Tensor, ...]
    """int64[T] for each group of layers: the block that holds the token's keys and values."""
    offsets: torch.Tensor
    """int64[T]: offset in that block."""
    adapters: torch.Tensor
    """int64[T]: see `SlotTables.adapters`."""
    attention: dict[View, tuple[AttentionBucket, ...]]
    """Attention buckets of each distinct view of the model's layers."""
    states: dict[int, StateRows]
    """State rows of each group with state blocks."""


def _first_seen(attention_window: AttentionWindow, positions: Int) -> Int:
    """Return the first position visible to each of ``positions``."""
    if attention_window.chunk is not None:
        return positions // attention_window.chunk * attention_window.chunk
    return (
        np.zeros_like(positions)
        if attention_window.window is None
        else np.maximum(positions + 1 - attention_window.window, 0)
    )


class BatchBuilder:
    """Builds the batches of one model."""

    def __init__(
        self,
        block_size: int,
        views: Iterable[View],
        needs_prompts: bool,
        dtype: torch.dtype,
    ) -> None:
        self._block_size = block_size
        self._views = tuple(dict.fromkeys(views))
        self._needs_prompts = needs_prompts
        self._dtype = dtype

    def build(self, rows: Rows, tables: SlotTables) -> Batch:
        """Build the batch of a step. ``tables`` already hold its deltas."""
        device, block_size = tables.device, self._block_size
        if len(rows.counts) and rows.counts.max() == 1:
            owners, positions = np.arange(len(rows.slots)), rows.starts
        else:
            owners, positions = ranges(rows.starts, rows.counts)
        slots = rows.slots[owners]
        prompts = None
        if self._needs_prompts:
            prompts = to_device(tables.num_prompt_tokens[slots], device)
        positions_tensor = to_device(positions, device)
        return Batch(
            num_tokens=len(positions),
            token_ids=tables.token_ids[to_device(slots, device), positions_tensor],
            positions=positions_tensor,
            prompts=prompts,
            blocks=tuple(
                to_device(table[slots, positions // block_size].astype(np.int64), device)
                for table in tables.block_table
            ),
            offsets=to_device(positions % block_size, device),
            adapters=to_device(tables.adapters[slots].astype(np.int64), device),
            attention={view: self._buckets(rows, tables, view) for view in self._views},
            states={
                index: state_rows(rows, tables, index)
                for index, group in enumerate(tables.kv.groups)
                if group.is_state
            },
        )

    def _buckets(self, rows: Rows, tables: SlotTables, view: View) -> tuple[AttentionBucket, ...]:
        """Partition the rows by new tokens, and by context length if padding is expensive."""
        buckets: list[AttentionBucket] = []
        (group, attention_window, heads), block_size = view, self._block_size
        table = tables.block_table[group]
        first_blocks = _first_seen(attention_window, rows.starts) // block_size
        num_blocks = -(-(rows.starts + rows.counts) // block_size) - first_blocks
        numbers = heads.num_kv_heads * (heads.head_dim + heads.value_width)
        for part in self._partition(rows, num_blocks, numbers * self._dtype.itemsize):
            whole = len(part) == len(rows.slots)
            buckets.append(
                self._bucket(
                    rows, table, part, first_blocks[part], num_blocks[part], view, whole, tables.device
                )
            )
        return tuple(buckets)

    def _partition(self, rows: Rows, num_blocks: Int, token_bytes: int) -> list[Int]:
        """Return index arrays that cover every row once. token_bytes: bytes of one token's keys and values."""
        parts: list[Int] = []
        for count in np.unique(rows.counts).tolist():
            same = np.flatnonzero(rows.counts == count)
            if count > MAX_FOLDED_TOKENS:
                # the fused kernel: equal starts, so that prompts from position 0 need no mask
                order = np.lexsort((rows.starts[same], num_blocks[same]))
                same = same[order]
                changes = np.diff(rows.starts[same]) != 0
                parts += np.split(same, np.flatnonzero(changes) + 1)
            else:
                parts += self._by_length(same, num_blocks[same])
        return [bucket for part in parts for bucket in self._bounded(part, num_blocks[part], token_bytes)]

    @staticmethod
    def _by_length(members: Int, blocks: Int) -> list[Int]:
        """Split off longer rows if padding every row to the longest costs more than `MAX_PADDING`."""
        if int(blocks.max()) * len(blocks) <= MAX_PADDING * int(blocks.sum()):
            return [members]
        classes = np.ceil(np.log2(blocks) * 2).astype(np.int64)  # each class within a factor of 1.42
        return [members[classes == value] for value in np.unique(classes).tolist()]

    def _bounded(self, members: Int, blocks: Int, token_bytes: int) -> list[Int]:
        """Split a bucket so that the gathered keys and values of each part fit `GATHER_BYTES`."""
        row_bytes = int(blocks.max()) * self._block_size * token_bytes
        most = max(1, GATHER_BYTES // row_bytes)
        return [members[i : i + most] for i in range(0, len(members), most)]

    def _bucket(
        self,
        rows: Rows,
        table: NDArray[np.int32],
        members: Int,
        first_blocks: Int,
        num_blocks: Int,
        view: View,
        whole: bool,
        device: torch.device,
    ) -> AttentionBucket:
        (_, attention_window, heads), block_size = view, self._block_size
        starts, num_new = rows.starts[members], int(rows.counts[members[0]])
        width = int(num_blocks.max())
        columns = first_blocks[:, None] + np.arange(width)  # [B, width]
        np.minimum(columns, table.shape[1] - 1, out=columns)
        # Past a row's last block are stale entries of earlier requests: valid memory, masked below.
        blocks = table[rows.slots[members][:, None], columns].astype(np.int64)
        tokens = None
        if not whole:
            tokens = to_device((rows.offsets[members][:, None] + np.arange(num_new)).reshape(-1), device)
        mask = bias = None
        is_from_zero = not starts.any() and not _first_seen(attention_window, np.array([num_new - 1])).any()
        causal_from_zero = num_new > MAX_FOLDED_TOKENS and is_from_zero
        if not causal_from_zero:
            keys = (first_blocks * block_size)[:, None] + np.arange(width * block_size)
            queries = starts[:, None] + np.arange(num_new)
            visible = keys[:, None, :] <= queries[:, :, None]  # [B, c, L]
            visible &= keys[:, None, :] >= _first_seen(attention_window, queries)[:, :, None]
            mask = to_device(visible[:, None], device)
            if num_new <= MAX_FOLDED_TOKENS:
                bias = self._bias(mask, heads)
        return AttentionBucket(
            num_rows=len(members),
            num_new=num_new,
            tokens=tokens,
            blocks=to_device(blocks[:, None], device),
            distance=to_device(first_blocks * block_size - starts, device),
            mask=mask,
            bias=bias,
        )

    def _bias(self, mask: torch.Tensor, heads: Heads) -> torch.Tensor:
        """Convert ``mask [B, 1, c, L]`` to an additive bias ``[B * kv_heads, 1 or groups * c, L]``."""
        num_rows, _, num_new, context = mask.shape
        bias = torch.zeros(mask.shape, dtype=self._dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        fold = 1 if num_new == 1 else heads.num_heads // heads.num_kv_heads
        bias = bias.unsqueeze(2).expand(num_rows, heads.num_kv_heads, fold, num_new, context)
        return bias.reshape(num_rows * heads.num_kv_heads, fold * num_new, context)


def state_rows(rows: Rows, tables: SlotTables, group: int) -> StateRows:
    """Return the blocks of a state group that the rows read and write."""
    device, named = tables.device, tables.block_table[group, rows.slots, :2].astype(np.int64)
    return StateRows(
        sources=to_device(named[:, 0].copy(), device),
        targets=to_device(named[:, 1].copy(), device),
        fresh=to_device(rows.starts == 0, device),
        offsets=to_device(rows.offsets, device),
        counts=to_device(rows.counts, device),
        max_count=int(rows.counts.max()),
    )
