"""Allocate memory for tables and KV blocks; on a CPU, pages are mapped on first write."""

from __future__ import annotations

import math

import numpy as np
import torch

LINE_BYTES = 64
"""Cache line size of the processor: an unaligned 512-bit vector spans two lines."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros of ``shape``. On a CPU, aligned to a cache line, and pages are mapped on first write (``calloc``).

    Masked attention multiplies masked values by 0, and 0 times NaN is NaN; so the memory must not be uninitialised.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size_bytes + LINE_BYTES, np.uint8)
    begin = -memory.ctypes.data % LINE_BYTES
    return torch.from_numpy(memory[begin : begin + size_bytes]).view(dtype).view(shape)


def to_device(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on ``device``; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
