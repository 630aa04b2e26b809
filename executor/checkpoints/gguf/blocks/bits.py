"""Reading and writing of fields of GGML blocks."""

from __future__ import annotations

import torch

MOST_HALF = 65504.0
"""Largest fp16 value."""


def half_of(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the fp16 value at a byte offset of each block, as float32 ``[num_blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def bits_of(raw: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """Unpack ``width``-bit values from bytes ``[num_blocks, n]``: for each ``run`` of bytes, all lowest bits first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (raw.reshape(len(raw), -1, 1, run) >> shifts & (1 << width) - 1).flatten(1)


def as_half(numbers: torch.Tensor) -> torch.Tensor:
    """Return the nearest finite fp16 values, as float32."""
    return numbers.clamp(-MOST_HALF, MOST_HALF).half().float()


def bytes_of_half(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bytes of fp16 values ``[num_blocks, 1]``."""
    return numbers.half().view(torch.uint8)


def bits_in(numbers: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """Pack ``width``-bit values, uint8 ``[num_blocks, n]``, into bytes; inverse of `bits_of`."""
    each = 8 // width
    runs = numbers.reshape(len(numbers), -1, each, run)
    whole = runs[:, :, 0].clone()
    for place in range(1, each):
        whole |= runs[:, :, place] << place * width
    return whole.flatten(1)
