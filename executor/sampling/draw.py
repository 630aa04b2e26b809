"""Draw tokens from logits with torch: the reference for the kernels, and the implementation of other devices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.argmax import argmax
from quintet.executor.memory import to_device
from quintet.executor.ragged import Int
from quintet.executor.sampling.inverse_cdf import choose
from quintet.executor.sampling.masks import Masks
from quintet.executor.sampling.min_p import cut_min_p
from quintet.executor.sampling.philox import uniform
from quintet.executor.sampling.settings import Settings
from quintet.executor.sampling.temperature import divide_by_temperature
from quintet.executor.sampling.top_k import cut_top_k
from quintet.executor.sampling.top_p import cut_top_p

FILTERS: tuple[Callable[[torch.Tensor, Settings], None], ...] = (
    divide_by_temperature,
    cut_min_p,
    cut_top_k,
    cut_top_p,
)
"""Filters of the logits of randomly sampled rows, in this order."""


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
    among equals. A random row with a NaN or without any token gives token 0. masks: of every slot, or None; a masked
    row gives a token of its mask for any logits.
    """
    chosen = logits[: len(slots)] if rows is None else logits[to_device(rows, logits.device)]
    if masks is not None:
        chosen = masks.applied(chosen, slots)
    mine = settings[slots]
    random = np.flatnonzero(mine["temperature"])
    if not len(random):
        return argmax(chosen).to(torch.int32)
    mine = mine[random]
    index = to_device(random, logits.device)
    wide = chosen[index].float()
    for apply in FILTERS:
        apply(wide, mine)
    uniforms = to_device(uniform(mine["seed"], positions[random]), logits.device)
    tokens = choose(wide, uniforms)
    if len(random) < len(slots):
        tokens = argmax(chosen).index_copy_(0, index, tokens)
    return tokens.to(torch.int32)
