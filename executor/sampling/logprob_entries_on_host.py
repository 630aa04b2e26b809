"""Log-probability entries on a CPU with ``csrc/cpu/kernels/logprobs.cpp``: two passes over a row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.ragged import Int
from quintet.executor.sampling.draw_on_host import row_addresses
from quintet.executor.sampling.logprob_entries import LogprobEntries, entries

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@cache
def _kernel() -> Callable[..., Any] | None:
    library = open_library()
    if library is None:
        return None
    return declare(
        *(library, "qt_logprobs", _ADDRESS, _SIZE, _INT, _SIZE, _ADDRESS, _SIZE),
        *(_ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
    )


def entries_on_host(
    logits: torch.Tensor, own: torch.Tensor, num_top: int, rows: Int | None = None
) -> LogprobEntries:
    """See `entries`. Lower ids come first among equals."""
    kernel = _kernel()
    if kernel is None:
        return entries(logits, own, num_top, rows)
    address, stride = row_addresses(logits)
    own = own.to(torch.int32).contiguous()
    count = len(own)
    found = LogprobEntries(
        np.empty((count, 1 + num_top), np.int32),
        np.empty((count, 1 + num_top), np.float32),
        np.empty(count, np.int32),
        np.empty(count, np.float64),
    )
    kernel(
        *(address, stride, FLOAT_CODES[logits.dtype], logits.shape[1]),
        *(None if rows is None else rows.ctypes.data, count, own.data_ptr(), num_top),
        *(found.ids.ctypes.data, found.values.ctypes.data),
        *(found.ranks.ctypes.data, found.normalizers.ctypes.data),
    )
    return found
