"""Token masks of a step: the allowed next tokens of each slot.

A mask is a row of bits per slot, applied last: the processed logits decide among its tokens. If the processed logits
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

    _fields_ = (("words", ctypes.c_void_p), ("stride", ctypes.c_int64), ("used", ctypes.c_void_p))


def mask_words(max_num_seqs: int, num_tokens: int) -> NDArray[np.uint32]:
    """Return rows of bits, one per slot. Pages of slots without a mask are never mapped."""
    return np.zeros((max_num_seqs, -(-num_tokens // 32)), np.uint32)


class Masks:
    """Masks of every slot for one step.

    Concurrent steps share the bit rows, because no slot draws in two of them, but have separate ``used`` flags.
    """

    def __init__(self, words: NDArray[np.uint32]) -> None:
        """words: see `mask_words`."""
        self.words = words
        """Bit t of a row, counted from the lowest bit of its first word: token t."""
        self.used: NDArray[np.uint8] = np.zeros(len(words), np.uint8)
        """0 for a slot without a mask; its row is undefined."""

    @cached_property
    def address(self) -> int:
        """Address for the kernels, valid while this object exists."""
        _, stride = self.words.shape
        self._described = CMasks(self.words.ctypes.data, stride, self.used.ctypes.data)
        return ctypes.addressof(self._described)

    def applied(self, logits: torch.Tensor, slots: Int) -> torch.Tensor:
        """Return rows of ``logits [n, vocab]`` in fp32 with masks applied; the same tensor if no row has a mask.

        Reference of ``copy_masked`` in ``csrc/cpu/kernels/logit_row.hpp``.
        """
        which = np.flatnonzero(self.used[slots])
        if not len(which):
            return logits
        device, vocab_size = logits.device, logits.shape[1]
        words = np.ascontiguousarray(self.words[slots[which], : -(-vocab_size // 32)])
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
