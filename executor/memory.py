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


Bits = np.ndarray[tuple[int, ...], np.dtype[np.integer]]
"""Values of a tensor as integers of the same size. Numpy has no bfloat16, but its small operations cost less than torch's."""


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the values of a tensor of 16 or 32 bits on the CPU; they share memory."""
    found: Bits = tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16).numpy()
    return found


def from_bits(values: Bits, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of these values; they share memory."""
    return torch.from_numpy(values).view(dtype)


def to_device(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on ``device``; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
