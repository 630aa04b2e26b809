"""Repetition, presence and frequency penalties with ``csrc/cuda/sampling_penalties.cu``.

The reference is `quintet.executor.sampling.penalties`. It adds a frequency penalty once per occurrence and rounds each time; the
kernel multiplies and rounds once.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.memory import to_device
from quintet.executor.sampling.logits_processor import DrawRows, Int
from quintet.executor.sampling.penalties import NO_PENALTIES, penalties_of
from quintet.wire.step import NewRow

PENALIZE = Kernel("sampling_penalties", "penalize", "plipl" + "p")
THREADS = 256
IDS_PER_BLOCK = 8192
"""As in the kernel."""

PENALIZED = np.dtype(
    [
        ("row", np.int32),
        ("slot", np.int32),  # -1: skip the row
        ("length", np.int32),
        ("num_prompt", np.int32),
        ("repetition", np.float32),  # 1: none
        ("presence", np.float32),  # 0: none
        ("frequency", np.float32),  # 0: none
        ("num_embedded", np.int32),  # leading positions with input embeddings instead of tokens
    ]
)
"""Record of a row, as laid out by the kernel."""


def penalize(
    device: Device, logits: torch.Tensor, token_ids: torch.Tensor, penalized: torch.Tensor
) -> torch.Tensor:
    """Apply penalties in place to the rows of ``logits [S, vocab]`` (fp32) named by ``penalized``; return the logits.

    token_ids: int32 ``[slots, length]``, the token table; penalized: int32 ``[n, 8]``, records of `PENALIZED`, each row at most
    once. One launch, no host sync. A row's logits depend only on its tokens.
    """
    _check("logits", logits, torch.float32, None)
    _check("token_ids", token_ids, torch.int32, None)
    _check("penalized", penalized, torch.int32, PENALIZED.itemsize // 4)
    for name, tensor in (("token_ids", token_ids), ("penalized", penalized)):
        if tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}; expected {logits.device} like the logits")
    if len(penalized):
        device.launch(
            PENALIZE,
            (-(-logits.shape[1] // IDS_PER_BLOCK), len(penalized), 1),
            (THREADS, 1, 1),
            (logits, logits.stride(0), logits.shape[1], token_ids, token_ids.stride(0), penalized),
        )
    return logits


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, width: int | None) -> None:
    is_table = tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.dtype == dtype
    if not is_table or (width is not None and (tensor.shape[1] != width or not tensor.is_contiguous())):
        raise ValueError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()}; expected {dtype}"
            f"[rows, {width or 'columns'}] with contiguous rows"
        )


class DevicePenalties:
    """`LogitsProcessor` of all three penalties, with one launch and one small upload per step."""

    def __init__(self, device: Device, max_num_seqs: int) -> None:
        self._device = device
        self._by_slot = np.zeros(max_num_seqs, PENALIZED)

    def admit(self, row: NewRow) -> bool:
        record, penalties = self._by_slot[row.slot], penalties_of(row.params)
        record["repetition"], record["presence"], record["frequency"] = penalties
        return penalties != NO_PENALTIES

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        slots = rows.slots[which]
        penalized = self._by_slot[slots]
        penalized["row"] = which
        penalized["slot"] = slots
        penalized["length"] = rows.lengths[which]
        penalized["num_prompt"] = rows.num_prompt[which]
        penalized["num_embedded"] = rows.tables.num_embedded[slots]
        words = penalized.view(np.int32).reshape(len(which), -1)
        penalize(self._device, logits, rows.tables.token_ids, to_device(words, logits.device))
