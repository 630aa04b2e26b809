"""Draw tokens from logits with torch: the reference for the kernels, and the implementation of other devices.

A random draw inverts each row's cumulative distribution at a uniform number. Two levels, blocks of the vocabulary and
tokens of one block, make the expensive pass a plain sum. The order of a row's reduction does not depend on the batch.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.ragged import Int
from quintet.executor.sampling.masks import Masks
from quintet.executor.sampling.philox import uniform
from quintet.executor.sampling.settings import FILTERS, Settings

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


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest logit of each row, int64 ``[rows]``; ties take the lowest. logits: ``[rows, vocab]``.

    A NaN counts as the largest.
    """
    return logits.argmax(dim=-1)


def draw(
    logits: torch.Tensor,
    settings: Settings,
    slots: Int,
    positions: Int,
    rows: Int | None = None,
    masks: Masks | None = None,
) -> torch.Tensor:
    """Return a token for each of n rows of ``logits [S, vocab]`` of any dtype: int32[n]. Does not change the logits.

    settings: of every slot. slots, positions: int64[n]: a row's slot, and its token's position, which determines the
    random number. rows: int64[n], or None for the first n. Temperature 0 selects the most likely token, the lowest id
    among equals. A random row with a NaN or without any token gives token 0. masks: of the n rows, or None; a masked
    row gives a token of its mask for any logits.
    """
    chosen = logits[: len(slots)] if rows is None else logits[to_device(rows, logits.device)]
    if masks is not None:
        chosen = masks.applied(chosen)
    mine = settings[slots]
    random = np.flatnonzero(mine["temperature"])
    if not len(random):
        return argmax(chosen).to(torch.int32)
    mine = mine[random]
    index = to_device(random, logits.device)
    shaped = chosen[index].float()
    for apply in FILTERS:
        apply(shaped, mine)
    uniforms = to_device(uniform(mine["seed"], positions[random]), logits.device)
    tokens = choose(shaped, uniforms)
    if len(random) < len(slots):
        tokens = argmax(chosen).index_copy_(0, index, tokens)
    return tokens.to(torch.int32)
