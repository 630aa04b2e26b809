"""The rows of one step as the device sees them: what every kernel of a step reads sizes, positions and blocks from.

`quintet.executor.backends.cuda.ops.tables` fills it at the step's beginning. Kept here is only where things are: no method reads
a value, because a value read by the host would stop the stream and could not be captured.

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
    """Device tensors of one step, the same for all layers. Rows and tokens past the plan's are padding."""

    num_rows: int
    """As launched: padded."""
    num_tokens: int
    """As launched: padded."""
    max_count: int
    """The most new tokens a row may have in this launch; 1 in a decode step."""
    slots: torch.Tensor
    """int32[num_rows]; -1: a padding row."""
    starts: torch.Tensor
    """int32[num_rows]: tokens of the row whose KV is there already; the first position computed now. Padding: 0."""
    counts: torch.Tensor
    """int32[num_rows]: tokens computed now. Padding: 0."""
    offsets: torch.Tensor
    """int32[num_rows + 1]: index of the row's first token among the step's; the last is the number of tokens that count."""
    token_ids: torch.Tensor
    """int32[num_tokens]. Padding: 0."""
    positions: torch.Tensor
    """int32[num_tokens]. Padding: -1, and such a token writes no KV."""
    token_rows: torch.Tensor
    """int32[num_tokens]: which row a token belongs to. Padding: -1."""
    block_table: torch.Tensor
    """int32[groups, max_num_seqs, max_blocks], a row per slot: block ids of a layer's KV, in the order of the tokens they hold.
    Of one group, as kernels read it: int32[max_num_seqs, max_blocks]."""
    block_size: int
    """Tokens per block."""
    prompts: torch.Tensor | None = None
    """int32[num_tokens]: how long the prompt of the token's row is, which some rotations depend on; see
    `quintet.executor.models.layers.rope`. Padding: 0."""
    kv_rows: torch.Tensor | None = None
    """int32[groups, num_tokens]: where the token's KV stands in the group's layers, ``block * block_size + row of the block``.
    Padding: -1. Of one group: int32[num_tokens]."""

    def of_group(self, group: int) -> StepRows:
        """Return the rows as layers of this group see them."""
        kv_rows = None if self.kv_rows is None else self.kv_rows[group]
        return replace(self, block_table=self.block_table[group], kv_rows=kv_rows)


@dataclass(slots=True)
class SampledRows:
    """The rows of a step that draw a token, in the step's order, then padding."""

    num_rows: int
    """As launched: padded."""
    slots: torch.Tensor
    """int32[num_rows]; -1: padding, which writes no token."""
    positions: torch.Tensor
    """int32[num_rows]: where the drawn token will stand, ``start + count``. Padding: 0."""
    tokens: torch.Tensor
    """int32[num_rows]: index among the step's tokens of the one whose logits are drawn from. Padding: 0."""
