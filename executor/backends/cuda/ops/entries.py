"""Log-probabilities with ``csrc/cuda/sampling_entries.cu``.

The reference is `quintet.executor.sampling.logprob_entries`; it also handles more top tokens than the kernel supports.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import SUFFIXES
from quintet.executor.backends.cuda.ops.logit_tiles import (
    check_column,
    check_logits,
    num_tiles,
    scan_tiles,
)
from quintet.executor.memory import to_device
from quintet.executor.ragged import Int
from quintet.executor.sampling.logprob_entries import LogprobEntries
from quintet.executor.sampling.logprob_entries import entries as entries_with_torch

REPORT = {
    dtype: Kernel("sampling_entries", f"report_{suffix}", "plippppipppp")
    for dtype, suffix in SUFFIXES.items()
}
THREADS = 512
SHARED_BYTES_PER_TILE = 8
"""Dynamic shared memory: a maximum and a count."""
MAX_TOP = 64
"""Maximum number of top tokens of the kernel; torch sorts for more."""


@dataclass(frozen=True, slots=True)
class DeviceEntries:
    """`LogprobEntries` on the device, in one buffer, so that one copy transfers it to the host."""

    memory: torch.Tensor
    """uint8: normalizers, ids, values, ranks."""
    num_rows: int
    num_top: int

    @classmethod
    def reserve(cls, num_rows: int, num_top: int, torch_device: torch.device) -> DeviceEntries:
        """Allocate the entries of ``num_rows`` rows."""
        size = num_rows * (8 + 8 * (1 + num_top) + 4)
        return cls(torch.empty(size, dtype=torch.uint8, device=torch_device), num_rows, num_top)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views: normalizers float64[n], ids int32 and values float32 ``[n, 1 + num_top]``, ranks int32[n]."""
        count, cells = self.num_rows, self.num_rows * (1 + self.num_top)
        ends = np.cumsum([8 * count, 4 * cells, 4 * cells]).tolist()
        return (
            self.memory[: ends[0]].view(torch.float64),
            self.memory[ends[0] : ends[1]].view(torch.int32).view(count, -1),
            self.memory[ends[1] : ends[2]].view(torch.float32).view(count, -1),
            self.memory[ends[2] :].view(torch.int32),
        )


def entries(
    device: Device, logits: torch.Tensor, own: torch.Tensor, num_top: int, rows: torch.Tensor | None = None
) -> DeviceEntries:
    """Compute the log-probabilities of n >= 1 rows of ``logits [S, vocab]`` (bf16, fp16 or fp32).

    own: int32[n], the drawn tokens; num_top: at most `MAX_TOP` and the vocabulary size; rows: int32[n], or None for the first n.
    Ties take the lower id first. A row with a NaN or an infinite maximum gives NaN and the first ids. The result of a row depends
    only on that row. Two launches.
    """
    count = len(own)
    check_logits(logits)
    check_column("own", own, count, logits)
    check_column("rows", rows, count, logits)
    if rows is None and count > len(logits):
        raise ValueError(f"own has {count} rows; expected at most {len(logits)}, the rows of logits, or rows")
    if not 0 <= num_top <= min(MAX_TOP, logits.shape[1]):
        raise ValueError(
            f"num_top is {num_top}; expected at most {MAX_TOP} and at most the vocabulary size {logits.shape[1]}"
        )
    result = DeviceEntries.reserve(count, num_top, logits.device)
    normalizers, ids, values, ranks = result.columns()
    maxima, sums = scan_tiles(device, logits, rows, None, None, count, 1.0)
    device.launch(
        REPORT[logits.dtype],
        (count, 1, 1),
        (THREADS, 1, 1),
        (
            *(logits, logits.stride(0), logits.shape[1], rows, own),
            *(maxima, sums, num_top, ids, values, ranks, normalizers),
        ),
        shared_bytes=SHARED_BYTES_PER_TILE * num_tiles(logits.shape[1]),
    )
    return result


def entries_on_device(
    device: Device, logits: torch.Tensor, own: torch.Tensor, num_top: int, rows: Int | None = None
) -> LogprobEntries:
    """See `quintet.executor.sampling.logprob_entries`. Synchronizes, because the result is on the host."""
    count = len(own)
    if not count or num_top > min(MAX_TOP, logits.shape[1]):
        return entries_with_torch(logits, own, num_top, rows)
    device_rows = None if rows is None else to_device(rows.astype(np.int32), logits.device)
    result = entries(device, logits, own.to(torch.int32).contiguous(), num_top, device_rows)
    on_host = DeviceEntries(result.memory.cpu(), count, num_top)
    normalizers, ids, values, ranks = (column.numpy() for column in on_host.columns())
    return LogprobEntries(ids, values, ranks, normalizers)
