"""Fields of GGML's blocks, whatever their format: read, and written."""

from __future__ import annotations

import torch

MOST_HALF = 65504.0
"""The largest number of fp16."""


def half_of(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the fp16 number at a byte of each block, as float32 ``[num_blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def bits_of(raw: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """Return the numbers of ``width`` bits in bytes ``[num_blocks, n]``: of each ``run`` of bytes first all lowest bits."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (raw.reshape(len(raw), -1, 1, run) >> shifts & (1 << width) - 1).flatten(1)


def as_half(numbers: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers of fp16, of which the largest are finite, as float32."""
    return numbers.clamp(-MOST_HALF, MOST_HALF).half().float()


def bytes_of_half(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bytes of fp16 numbers ``[num_blocks, 1]``."""
    return numbers.half().view(torch.uint8)


def bits_in(numbers: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """Return uint8 ``[num_blocks, n]`` of ``width`` bits in bytes, such that `bits_of` gives them back."""
    each = 8 // width
    runs = numbers.reshape(len(numbers), -1, each, run)
    whole = runs[:, :, 0].clone()
    for place in range(1, each):
        whole |= runs[:, :, place] << place * width
    return whole.flatten(1)
