"""Device memory of the slot tables and of the rows of a step, allocated once so that addresses do not change.

Only `quintet.executor.backends.cuda.ops.tables` writes the contents: tables from plans, rows for each step. Captured graphs of
all padded sizes share the rows' memory; each uses a prefix of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quintet.executor.model_config.share import most_outputs
from quintet.wire.config import SchedulerConfig
from quintet.wire.kv_spec import KvSpec


@dataclass(slots=True)
class StepRows:
    """Device tensors of one step, shared by all layers. Rows and tokens after the plan's are padding.

    No method reads a value on the host: that would synchronize the stream and could not be captured.

    ```
     row          0            1        2 (padding)
     slots        7            2       -1
     starts       40           0        0
     counts       1            3        0
     offsets      0            1        4      4
     token        0     1      2      3       4 (padding)
     token_rows   0     1      1      1      -1
     positions    40    0      1      2      -1
    ```
    """

    num_rows: int
    """With padding."""
    num_tokens: int
    """With padding."""
    max_count: int
    """Maximum number of new tokens of a row; 1 in a decode step."""
    slots: torch.Tensor
    """int32[num_rows]. Padding: -1."""
    starts: torch.Tensor
    """int32[num_rows]: tokens with KV in the cache, which is the position of the first new token. Padding: 0."""
    counts: torch.Tensor
    """int32[num_rows]: new tokens. Padding: 0."""
    offsets: torch.Tensor
    """int32[num_rows + 1]: index of the row's first token in the step; the last entry is the number of tokens."""
    token_ids: torch.Tensor
    """int32[num_tokens]. Padding: 0."""
    positions: torch.Tensor
    """int32[num_tokens]. Padding: -1; the kernels write no KV for it."""
    token_rows: torch.Tensor
    """int32[num_tokens]: row of the token. Padding: -1."""
    block_table: torch.Tensor
    """int32[groups, max_num_seqs, max_blocks]: block ids per slot, in token order. After `of_group`:
    int32[max_num_seqs, max_blocks]."""
    block_size: int
    """Tokens per block."""
    prompts: torch.Tensor | None = None
    """int32[num_tokens]: prompt length of the token's row, used by some RoPE types; see `quintet.executor.models.layers.rope`.
    Padding: 0."""
    kv_rows: torch.Tensor | None = None
    """int32[groups, num_tokens]: location of the token's KV, ``block * block_size + offset``. Padding: -1. After `of_group`:
    int32[num_tokens]."""

    def of_group(self, group: int) -> StepRows:
        """Return the rows with the block table of one KV group."""
        kv_rows = None if self.kv_rows is None else self.kv_rows[group]
        return replace(self, block_table=self.block_table[group], kv_rows=kv_rows)


@dataclass(slots=True)
class SampledRows:
    """Draws of a step, in step order, then padding. A row with drafts draws after each of its tokens."""

    num_rows: int
    """With padding."""
    slots: torch.Tensor
    """int32[num_rows]. Padding: -1; the kernels write no token for it."""
    positions: torch.Tensor
    """int32[num_rows]: position of the drawn token, ``start + count`` without drafts. Padding: 0."""
    tokens: torch.Tensor
    """int32[num_rows]: index into the step's tokens, for the logits. Padding: 0."""


RECORD_BYTES = 32
"""Size of a slot's sampling settings: `quintet.executor.sampling.settings.RECORD`."""


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """Slot tables on the device: one row per slot, at a fixed address."""

    token_ids: torch.Tensor
    """int32[max_num_seqs, max_model_len + 1]. A plan made one step too far may write the extra column."""
    block_table: torch.Tensor
    """int32[groups, max_num_seqs, max_blocks]"""
    num_prompt_tokens: torch.Tensor
    """int32[max_num_seqs]"""
    settings: torch.Tensor
    """uint8[max_num_seqs, RECORD_BYTES]"""
    kv: KvSpec

    @classmethod
    def reserve(cls, max_num_seqs: int, max_model_len: int, kv: KvSpec, device: torch.device) -> DeviceTables:
        """Allocate zeroed tables: entries that no plan wrote are then valid blocks and tokens."""
        columns = max_model_len + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(max_num_seqs, columns),
            block_table=zeros(len(kv.groups), max_num_seqs, max(2, -(-columns // kv.block_size))),
            num_prompt_tokens=zeros(max_num_seqs),
            settings=zeros(max_num_seqs, RECORD_BYTES, dtype=torch.uint8),
            kv=kv,
        )


class StepMemory:
    """Memory of the rows of the largest step."""

    @classmethod
    def reserve(cls, tables: DeviceTables, scheduler: SchedulerConfig) -> StepMemory:
        """Allocate memory for the largest step of a configuration."""
        max_tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        if scheduler.speculative is None:
            return cls(tables, max_tokens)
        return cls(tables, max_tokens, min(most_outputs(scheduler), max_tokens))

    def __init__(self, tables: DeviceTables, max_tokens: int, max_draws: int | None = None) -> None:
        """max_tokens, max_draws: of a step. The number of rows is that of the slots; so is by default that of draws."""
        self.tables = tables
        self.max_rows = tables.token_ids.shape[0]
        self.max_tokens = max_tokens
        self.max_draws = self.max_rows if max_draws is None else max_draws
        device = tables.token_ids.device
        self._rows = torch.zeros((3, self.max_rows + 1), dtype=torch.int32, device=device)
        self._draws = torch.zeros((3, self.max_draws + 1), dtype=torch.int32, device=device)
        self._offsets = torch.zeros(self.max_rows + 1, dtype=torch.int32, device=device)
        self._tokens = torch.zeros((4, max_tokens), dtype=torch.int32, device=device)
        num_groups = len(tables.block_table)
        self._kv_rows = torch.zeros((num_groups, max_tokens), dtype=torch.int32, device=device)

    def rows(self, num_rows: int, num_tokens: int, max_count: int) -> StepRows:
        """Return the rows of a step of these padded sizes. All steps share the memory."""
        self._check(num_rows, num_tokens)
        slots, starts, counts = (self._rows[i, :num_rows] for i in range(3))
        token_ids, positions, token_rows, prompts = (self._tokens[i, :num_tokens] for i in range(4))
        return StepRows(
            num_rows=num_rows,
            num_tokens=num_tokens,
            max_count=max_count,
            slots=slots,
            starts=starts,
            counts=counts,
            offsets=self._offsets[: num_rows + 1],
            token_ids=token_ids,
            positions=positions,
            token_rows=token_rows,
            block_table=self.tables.block_table,
            block_size=self.tables.kv.block_size,
            prompts=prompts,
            kv_rows=self._kv_rows[:, :num_tokens],
        )

    def sampled(self, num_rows: int) -> SampledRows:
        """Return the draws, padded to ``num_rows``."""
        if num_rows > self.max_draws:
            raise ValueError(f"a step has {num_rows} draws; at most {self.max_draws} are allowed")
        slots, positions, tokens = (self._draws[i, :num_rows] for i in range(3))
        return SampledRows(num_rows=num_rows, slots=slots, positions=positions, tokens=tokens)

    def _check(self, num_rows: int, num_tokens: int) -> None:
        if num_rows > self.max_rows or num_tokens > self.max_tokens:
            raise ValueError(
                f"a step has {num_rows} rows and {num_tokens} tokens; at most"
                f" {self.max_rows} rows and {self.max_tokens} tokens are allowed"
            )
