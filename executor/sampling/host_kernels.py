"""Draws and log-probabilities on a CPU by the compiled kernels.

``csrc/cpu/kernels/sampling.cpp`` draws in few passes over a row, without a sort or an fp32 copy.
``csrc/cpu/kernels/logprobs.cpp`` takes two passes.
"""

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
from quintet.executor.sampling.draw import draw
from quintet.executor.sampling.logprob_entries import LogprobEntries, entries
from quintet.executor.sampling.masks import Masks
from quintet.executor.sampling.settings import Settings

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@cache
def _kernel(name: str, *last: Any) -> Callable[..., Any] | None:
    """Return a kernel over rows of logits; None if the library is not built. last: types of its own arguments."""
    library = open_library()
    if library is None:
        return None
    return declare(library, name, _ADDRESS, _SIZE, _INT, _SIZE, _ADDRESS, _SIZE, *last)


def draw_on_host(
    logits: torch.Tensor,
    settings: Settings,
    slots: Int,
    positions: Int,
    rows: Int | None = None,
    masks: Masks | None = None,
) -> torch.Tensor:
    """See `draw`. Gives the same tokens, except that sums of weights are rounded in another order."""
    kernel = _kernel("qt_draw", *[_ADDRESS] * 5)
    if kernel is None:
        return draw(logits, settings, slots, positions, rows, masks)
    tokens = torch.empty(len(slots), dtype=torch.int32)
    address, stride = row_addresses(logits)
    kernel(
        *(address, stride, FLOAT_CODES[logits.dtype], logits.shape[1]),
        *(None if rows is None else rows.ctypes.data, len(slots)),
        *(settings.ctypes.data, slots.ctypes.data, positions.ctypes.data),
        *(None if masks is None else masks.address, tokens.data_ptr()),
    )
    return tokens


def row_addresses(logits: torch.Tensor) -> tuple[int, int]:
    """Return address and stride of rows of logits. Raises `ValueError` if a kernel cannot read them."""
    if logits.dim() != 2 or logits.stride(1) != 1 or logits.dtype not in FLOAT_CODES:
        raise ValueError(
            f"logits are {logits.dtype}{list(logits.shape)} with strides {logits.stride()}; expected [rows, vocab] of"
            " bfloat16, float16 or float32 with contiguous elements in a row"
        )
    return logits.data_ptr(), logits.stride(0)


def entries_on_host(
    logits: torch.Tensor, own: torch.Tensor, num_top: int, rows: Int | None = None
) -> LogprobEntries:
    """See `entries`. Lower ids come first among equals."""
    kernel = _kernel("qt_logprobs", _ADDRESS, _SIZE, *[_ADDRESS] * 4)
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
