"""Masks: which tokens a request may draw now, as data of the step.

A mask is a row of bits per slot. Whoever draws applies it last: what other concerns left of the logits decides among the
tokens of the mask. Where they contradict it, so that nothing is left, its first token is drawn: a form that was asked for holds.
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
"""Logits are taken to lie between this and its negative, so that no quotient by a temperature is infinite."""


class CMasks(ctypes.Structure):
    """Field by field ``qt::Masks`` of ``csrc/cpu/sampling.hpp``."""

    _fields_ = (("words", ctypes.c_void_p), ("stride", ctypes.c_int64), ("used", ctypes.c_void_p))


def mask_words(max_num_seqs: int, num_tokens: int) -> NDArray[np.uint32]:
    """Return rows of bits, one a slot. Pages of slots that never use one are never touched."""
    return np.zeros((max_num_seqs, -(-num_tokens // 32)), np.uint32)


class Masks:
    """Of every slot, for one step.

    Steps that are under way at once share the rows of bits, since no slot draws in two of them, but not which of the rows mean
    anything.
    """

    def __init__(self, words: NDArray[np.uint32]) -> None:
        """words: see `mask_words`."""
        self.words = words
        """Bit t of a row, from the lowest of its first word: token t."""
        self.used: NDArray[np.uint8] = np.zeros(len(words), np.uint8)
        """0 where every token may be drawn, and the row means nothing."""

    @cached_property
    def address(self) -> int:
        """Where the kernels find them, for as long as this lives."""
        _, stride = self.words.shape
        self._described = CMasks(self.words.ctypes.data, stride, self.used.ctypes.data)
        return ctypes.addressof(self._described)

    def applied(self, logits: torch.Tensor, slots: Int) -> torch.Tensor:
        """Return rows of ``logits [n, vocab]`` in fp32 as their slots' masks leave them; the same tensor where none has one.

        The reference of ``copy_masked`` in ``csrc/cpu/kernels/logit_row.hpp``.
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
