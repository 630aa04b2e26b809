"""Draw from a categorical distribution: invert each row's cumulative distribution at a uniform number.

Two levels, blocks of the vocabulary and tokens of one block, make the expensive pass a plain sum. The order of a
row's reduction does not depend on the batch.
"""

from __future__ import annotations

import torch

BLOCK = 128


def choose(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return a token per row, int64[n], drawn with probability ``softmax(logits)``.

    logits: fp32 ``[n, vocab]``; uniforms: float64 ``[n]`` in (0, 1). Tokens of probability 0 are never drawn; a row
    without other tokens gives token 0.
    """
    vocab_size = logits.shape[1]
    weights = torch.softmax(logits, dim=-1)
    empty = weights[:, 0].isnan()
    whole = vocab_size // BLOCK * BLOCK
    sums = weights[:, :whole].view(len(weights), -1, BLOCK).sum(dim=-1)
    if whole < vocab_size:
        sums = torch.cat((sums, weights[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    blocks, inside = _invert(sums.double(), uniforms)

    columns = blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=logits.device)
    beyond = columns >= vocab_size
    members = weights.gather(1, columns.clamp_(max=vocab_size - 1)).masked_fill_(beyond, 0.0)
    tokens, _ = _invert(members.double(), inside)
    return (blocks * BLOCK + tokens).masked_fill_(empty, 0).clamp_(max=vocab_size - 1)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index where the cumulative share first exceeds ``uniforms``, and the fraction within its weight, in [0, 1)."""
    cumulated = weights.cumsum(dim=-1)
    target = uniforms * cumulated[:, -1]
    # never past the last positive weight, despite rounding of the product
    last = (weights > 0).mul(torch.arange(1, weights.shape[1] + 1, device=weights.device)).amax(dim=-1) - 1
    index = torch.searchsorted(cumulated, target.unsqueeze(1), right=True).squeeze(1)
    index = torch.minimum(index, last.clamp_(min=0))
    own = weights.gather(1, index.unsqueeze(1)).squeeze(1)
    before = cumulated.gather(1, index.unsqueeze(1)).squeeze(1) - own
    return index, ((target - before) / own).clamp_(0.0, 1.0 - 2.0**-52)
