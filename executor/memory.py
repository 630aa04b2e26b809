"""Memory for tables and KV blocks: reserved at boot, paid for when touched."""

from __future__ import annotations

import numpy as np
import torch

_NUMPY_OF_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros of ``shape``. On a CPU, pages are mapped when first written (``calloc``).

    Zeros rather than uninitialised memory because masked attention still multiplies what it ignores by 0, and
    0 times a stray NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = torch.empty((), dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(shape, _NUMPY_OF_SIZE[size])).view(dtype)


def to_device(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on ``device``; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
