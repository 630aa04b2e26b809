"""Memory for tables and KV blocks: reserved at boot, paid for when touched."""

from __future__ import annotations

import math

import numpy as np
import torch

LINE_BYTES = 64
"""Of a processor's cache: a vector of 512 bits that begins elsewhere is in two lines."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros of ``shape``. On a CPU, pages are mapped when first written (``calloc``), and a cache line begins there.

    Zeros rather than uninitialised memory because masked attention still multiplies what it ignores by 0, and
    0 times a stray NaN is NaN.
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
