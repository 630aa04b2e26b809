"""Rows of one step on the device: sizes, positions and blocks that the kernels of a step read.

`quintet.executor.backends.cuda.ops.tables` fills them at the start of the step. No method reads a value on the host: that would
synchronize the stream and could not be captured.

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

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(slots=True)
class StepRows:
    """Device tensors of one step, shared by all layers. Rows and tokens after the plan's are padding."""

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
