"""Packs a plan into one buffer of words, and launches the kernels that apply it to the device's tables.

`pack_staging` and ``csrc/cuda/tables.cu`` define the order of the sections. The block pairs of swaps and copies follow the
sections; `PackedPlan` has their offsets, for `quintet.executor.backends.cuda.ops.blocks`.

A plan may contain an entry of the block table more than once, and the last one wins. Kernels write in no order, so the host
drops the earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.backends.cuda.device import Argument, Device, Kernel
from quintet.executor.backends.cuda.tables import DeviceTables, SampledRows, StepRows
from quintet.executor.sampling.settings import RECORD, settings_of
from quintet.executor.slots import Rows
from quintet.wire.step import NewRow, StepPlan

Words = NDArray[np.int32]

HEADER_WORDS = 16
RECORD_WORDS = RECORD.itemsize // 4
EMPTY = np.zeros(0, np.int32)
NO_NEW_ROWS: tuple[Words, ...] = (np.zeros(1, np.int32),)
"""Sections of new rows if there are none: one token offset."""

_TABLES, _ROWS = "pplpliilpp", "ppppippppplipppi"
APPLY_PLAN = Kernel("tables", "apply_plan", _TABLES + _ROWS)
APPLY_DELTAS = Kernel("tables", "apply_deltas", _TABLES)
FILL_ROWS = Kernel("tables", "fill_rows", _TABLES + _ROWS)
SCATTER_TOKENS = Kernel("tables", "scatter_tokens", "ppppli")

ONE_BLOCK_TOKENS = 1024
"""Up to this many tokens, one block of 512 threads is faster than a second launch."""

DELTA_BLOCKS = 32
"""Fixed number of blocks, because a captured launch must not depend on the number of deltas; enough for a long prompt."""


class PlanRangeError(ValueError):
    """A slot, position or block of a plan is out of range of the device's tables."""


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """Limits of a plan's indices, and the size of a packed plan."""

    max_num_seqs: int
    token_columns: int
    """Columns of the token table: ``max_model_len + 1``."""
    block_columns: int
    """Columns of the block table."""
    num_blocks: int
    """Number of device blocks."""
    num_host_blocks: int = 0
    """Number of host blocks for swapping."""
    num_groups: int = 1
    """Number of KV groups, each with its own block table."""

    @classmethod
    def of(cls, tables: DeviceTables, num_blocks: int, num_host_blocks: int = 0) -> StagingLayout:
        """Return the layout for plans of these tables."""
        max_num_seqs, token_columns = tables.token_ids.shape
        num_groups, _, block_columns = tables.block_table.shape
        return cls(max_num_seqs, token_columns, block_columns, num_blocks, num_host_blocks, num_groups)

    def num_words(self, plan: StepPlan) -> int:
        """Return an upper bound of the plan's words in a staging buffer."""
        num_rows, num_new = len(plan.samples), len(plan.new_rows)
        num_draws = sum(plan.samples)
        columns = len(plan.slots) + len(plan.starts) + len(plan.counts) + len(plan.blocks)
        pairs = len(plan.swaps_out) + len(plan.swaps_in) + len(plan.copies)
        tokens = sum(len(row.token_ids) for row in plan.new_rows)
        rows = num_rows + 6 * num_draws + (3 + RECORD_WORDS) * num_new
        return HEADER_WORDS + (columns + pairs + tokens) // 4 + rows + 2


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """Sizes of a packed plan, before padding, and offsets of its block pairs."""

    num_rows: int
    num_tokens: int
    max_count: int
    num_sampled: int
    num_words: int
    swaps_out: slice
    """Words with pairs ``source block, target block``: copies to host memory, executed first."""
    swaps_in: slice
    """Copies from host memory, executed second."""
    copies: slice
    """Copies within device memory, executed before the step."""
    drafts: slice
    """Draft tokens, written to the token table before the step: slots, then positions, then tokens."""


def pack_staging(
    plan: StepPlan, layout: StagingLayout, into: Words, drafts: Words | None = None
) -> PackedPlan:
    """Write the plan to ``into``, of at least `StagingLayout.num_words` words; raise `PlanRangeError`.

    drafts: the draft tokens of all rows, in order; each is followed by a draw.

    Loops in Python only over new rows, which most steps do not have.
    """
    slots, starts, counts = (
        np.frombuffer(column, np.int32) for column in (plan.slots, plan.starts, plan.counts)
    )
    _check_inside("slot", slots, layout.max_num_seqs)
    _check_inside("last position", starts + counts, layout.token_columns)
    offsets = np.zeros(len(slots) + 1, np.int32)
    counts.cumsum(out=offsets[1:])
    sampled, drafted = _draws(plan, slots, starts + counts, offsets, drafts)

    entries = _table_entries(plan.blocks, layout) if plan.blocks else EMPTY
    new_rows, num_new_rows, num_new_tokens = NO_NEW_ROWS, 0, 0
    if plan.new_rows:
        new_rows, num_new_rows, num_new_tokens = _new_rows(plan.new_rows, layout)
    copies = np.frombuffer(plan.copies, np.int32)
    _check_inside("block to copy", copies, layout.num_blocks)
    swaps_out = swaps_in = EMPTY
    if plan.swaps_out or plan.swaps_in:
        swaps_out = _swaps(plan.swaps_out, layout).reshape(-1)
        # The wire has the device block first in both directions; kernels need source, then target.
        swaps_in = _swaps(plan.swaps_in, layout)[:, ::-1].reshape(-1)

    header = np.zeros(HEADER_WORDS, np.int32)
    num_tokens = int(offsets[-1])
    num_rows, num_sampled = len(slots), len(sampled[0])
    header[:6] = num_rows, num_tokens, num_sampled, len(entries) // 3, num_new_rows, num_new_tokens
    sections = (
        *(header, slots, starts, counts, offsets, *sampled),
        *(entries, *new_rows, swaps_out, swaps_in, copies, drafted),
    )
    needed = sum(map(len, sections))
    if needed > len(into):
        raise ValueError(f"the plan needs {needed} words of staging; the buffer has {len(into)}")
    np.concatenate(sections, out=into[:needed])
    drafts_at = needed - len(drafted)
    copies_at = drafts_at - len(copies)
    swaps_in_at = copies_at - len(swaps_in)
    return PackedPlan(
        num_rows=num_rows,
        num_tokens=num_tokens,
        max_count=int(counts.max(initial=0)),
        num_sampled=num_sampled,
        num_words=needed,
        swaps_out=slice(swaps_in_at - len(swaps_out), swaps_in_at),
        swaps_in=slice(swaps_in_at, copies_at),
        copies=slice(copies_at, drafts_at),
        drafts=slice(drafts_at, needed),
    )


def _draws(
    plan: StepPlan, slots: Words, ends: Words, offsets: Words, drafts: Words | None
) -> tuple[tuple[Words, Words, Words], Words]:
    """Return slot, position and preceding token of each draw, and the words of `PackedPlan.drafts`.

    ends, offsets: the position after each row's tokens, and the index of its first token.
    """
    if drafts is not None:
        rows = Rows(plan)
        owners, positions = slots[rows.sampling], rows.draw_positions.astype(np.int32)
        # A draft is at the position of a draw, after which the row draws again.
        is_draft = np.diff(rows.sampling, append=-1) == 0
        drafted = np.concatenate((owners[is_draft], positions[is_draft], drafts))
        return (owners, positions, rows.draw_tokens.astype(np.int32)), drafted
    if b"\0" in plan.samples:
        sampling = np.frombuffer(plan.samples, np.bool_)
        return (slots[sampling], ends[sampling], offsets[1:][sampling] - 1), EMPTY
    return (slots, ends, offsets[1:] - 1), EMPTY


def _table_entries(blocks: bytes, layout: StagingLayout) -> Words:
    """Return triples ``row, index, block``, without entries that a later one overwrites.

    A row is ``group * max_num_seqs + slot``: the block tables of the groups are concatenated.
    """
    columns = np.frombuffer(blocks, np.int32).reshape(-1, 4)
    limits = (layout.max_num_seqs, layout.num_groups, layout.block_columns, layout.num_blocks)
    if (columns.view(np.uint32) >= np.array(limits, np.uint32)).any():
        names = ("slot of a block", "group of a block", "index in a block table", "block")
        for name, column, limit in zip(names, columns.T, limits, strict=True):
            _check_inside(name, column, limit)
    rows = columns[:, 1] * layout.max_num_seqs + columns[:, 0]
    entries = np.column_stack((rows, columns[:, 2:]))
    places = (rows.astype(np.int64) << 32) | entries[:, 1]
    if len(set(places.tolist())) < len(places):
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        entries = entries[order[np.append(ordered[1:] != ordered[:-1], True)]]
    return entries.reshape(-1)


def _new_rows(rows: Sequence[NewRow], layout: StagingLayout) -> tuple[tuple[Words, ...], int, int]:
    """Return the sections of new rows (the last one per slot), the number of rows, and the number of tokens."""
    rows = list({row.slot: row for row in rows}.values())
    tokens = [np.frombuffer(row.token_ids, np.int32) for row in rows]
    slots = np.array([row.slot for row in rows], np.int32)
    prompts = np.array([row.num_prompt_tokens for row in rows], np.int32)
    offsets = np.zeros(len(rows) + 1, np.int32)
    lengths = np.array([len(ids) for ids in tokens], np.int32)
    _check_inside("slot of a new row", slots, layout.max_num_seqs)
    _check_inside("length of a new row", lengths, layout.token_columns + 1)
    lengths.cumsum(out=offsets[1:])
    settings = np.array([settings_of(row.params, row.seed) for row in rows], RECORD)
    return (slots, prompts, offsets, settings.view(np.int32), *tokens), len(rows), int(offsets[-1])


def _swaps(pairs: bytes, layout: StagingLayout) -> Words:
    """Return checked pairs ``device block, host block``."""
    swaps = np.frombuffer(pairs, np.int32).reshape(-1, 2)
    _check_inside("block to swap", swaps[:, 0], layout.num_blocks)
    _check_inside("host block", swaps[:, 1], layout.num_host_blocks)
    return swaps


def _check_inside(name: str, values: Words, limit: int) -> None:
    """Raise unless all values are in ``[0, limit)``; the unsigned comparison also rejects negative values."""
    if len(values) and int(values.view(np.uint32).max()) >= limit:
        raise PlanRangeError(
            f"{name}: the plan has {int(values.min())} to {int(values.max())}; must be at least 0 and below {limit}"
        )


def apply_plan(
    device: Device, staging: torch.Tensor, tables: DeviceTables, rows: StepRows, sampled: SampledRows
) -> None:
    """Apply the plan in ``staging`` (int32, on the device) to ``tables``, and fill ``rows`` and ``sampled``.

    One launch for steps of up to `ONE_BLOCK_TOKENS` tokens, otherwise two; no host sync. ``rows`` and ``sampled`` must be at
    least as large as the plan's (`PackedPlan`); the rest becomes padding.
    """
    if staging.dtype != torch.int32 or staging.ndim != 1 or not staging.is_contiguous():
        raise ValueError(
            f"staging: expected contiguous int32[words], got {staging.dtype}{list(staging.shape)}"
        )
    if rows.prompts is None or rows.kv_rows is None or rows.kv_rows.ndim != 2:
        raise ValueError(
            "rows: expected prompts, int32[num_tokens], and kv_rows, int32[groups, num_tokens], from StepMemory"
        )
    deltas: tuple[Argument, ...] = (
        *(staging, tables.token_ids, tables.token_ids.stride(0)),
        *(tables.block_table, tables.block_table.stride(1), tables.kv.block_size),
        *(len(tables.block_table), tables.block_table.stride(0)),
        *(tables.num_prompt_tokens, tables.settings),
    )
    outputs: tuple[Argument, ...] = (
        *(rows.slots, rows.starts, rows.counts, rows.offsets, rows.num_rows),
        *(rows.token_ids, rows.positions, rows.token_rows, rows.prompts),
        *(rows.kv_rows, rows.kv_rows.stride(0), rows.num_tokens),
        *(sampled.slots, sampled.positions, sampled.tokens, sampled.num_rows),
    )
    if rows.num_tokens <= ONE_BLOCK_TOKENS:
        device.launch(APPLY_PLAN, (1, 1, 1), (512, 1, 1), deltas + outputs)
        return
    device.launch(APPLY_DELTAS, (DELTA_BLOCKS, 1, 1), (256, 1, 1), deltas)
    num_blocks = -(-max(rows.num_rows + 1, rows.num_tokens) // 256)
    device.launch(FILL_ROWS, (num_blocks, 1, 1), (256, 1, 1), deltas + outputs)


def scatter_tokens(device: Device, drawn: torch.Tensor, sampled: SampledRows, tables: DeviceTables) -> None:
    """Write the drawn tokens, int32[num_rows], to the token table, each at its row's next position."""
    if drawn.dtype != torch.int32 or drawn.shape != (sampled.num_rows,) or not drawn.is_contiguous():
        raise ValueError(
            f"drawn: expected contiguous int32[{sampled.num_rows}], got {drawn.dtype}{list(drawn.shape)}"
        )
    _scatter(device, drawn, sampled.slots, sampled.positions, tables)


def scatter_drafts(device: Device, drafts: torch.Tensor, tables: DeviceTables) -> None:
    """Write draft tokens to the token table. drafts: the words of `PackedPlan.drafts` on the device."""
    if len(drafts):
        slots, positions, tokens = drafts.view(3, -1)
        _scatter(device, tokens, slots, positions, tables)


def _scatter(
    device: Device, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tables: DeviceTables
) -> None:
    columns = tables.token_ids.stride(0)
    device.launch(
        SCATTER_TOKENS,
        (-(-len(tokens) // 128), 1, 1),
        (128, 1, 1),
        (tokens, slots, positions, tables.token_ids, columns, len(tokens)),
    )
