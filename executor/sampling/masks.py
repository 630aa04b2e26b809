"""Token masks of a step: the allowed tokens of each draw.

A mask is a row of bits, applied last: the processed logits decide among its tokens. If the processed logits
exclude all of them, the mask's first token is drawn, so an output always matches its grammar.
"""

from __future__ import annotations

import ctypes
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.memory import to_device
from quintet.executor.ragged import Int

MOST = 1e30
"""Limit of a logit's magnitude, so that division by a temperature cannot overflow."""


class CMasks(ctypes.Structure):
    """The layout of ``qt::Masks`` in ``csrc/cpu/ops/sampling.hpp``."""

    _fields_ = (("words", ctypes.c_void_p), ("stride", ctypes.c_int64), ("rows", ctypes.c_void_p))


def mask_words(num_masks: int, num_tokens: int) -> NDArray[np.uint32]:
    """Return one row of bits per mask. Pages of unused rows are never mapped."""
    return np.zeros((num_masks, -(-num_tokens // 32)), np.uint32)


class Masks:
    """Masks of the n draws of a call. Steps share the rows of bits; no two of them use the same row at once."""

    def __init__(self, words: NDArray[np.uint32], rows: Int) -> None:
        """words: see `mask_words`. rows: int64[n], the row of each draw's mask, -1 for none."""
        self.words = words
        """Bit t of a row, counted from the lowest bit of its first word: token t."""
        self.rows = rows

    def take(self, which: Int) -> Masks:
        """Return the masks of a subset of the draws."""
        return Masks(self.words, self.rows[which])

    @cached_property
    def address(self) -> int:
        """Address for the kernels, valid while this object exists."""
        _, stride = self.words.shape
        self._described = CMasks(self.words.ctypes.data, stride, self.rows.ctypes.data)
        return ctypes.addressof(self._described)

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """Return rows of ``logits [n, vocab]`` in fp32 with masks applied; the same tensor if no row has a mask.

        Reference of ``copy_masked`` in ``csrc/cpu/kernels/logit_row.hpp``.
        """
        which = np.flatnonzero(self.rows >= 0)
        if not len(which):
            return logits
        device, vocab_size = logits.device, logits.shape[1]
        words = np.ascontiguousarray(self.words[self.rows[which], : -(-vocab_size // 32)])
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        allowed = to_device(bits, device).bool()
        at = to_device(which, device)
        wide = logits.float() if logits.dtype != torch.float32 else logits.clone()
        rows = wide[at]
        rows = torch.where(allowed & (rows >= -MOST), rows.clamp(max=MOST), -torch.inf)
        is_empty = rows.amax(dim=-1) == -torch.inf
        first = allowed.to(torch.uint8).argmax(dim=-1, keepdim=True)
        rows = torch.where(is_empty.unsqueeze(1), rows.scatter(1, first, 0.0), rows)
        wide[at] = rows
        return wide
