"""Fields of GGML's blocks, whatever their format."""

from __future__ import annotations

import torch


def half_of(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the fp16 number at a byte of each block, as float32 ``[num_blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def bits_of(raw: torch.Tensor, run: int, width: int) -> torch.Tensor:
    """Return the numbers of ``width`` bits in bytes ``[num_blocks, n]``: of each ``run`` of bytes first all lowest bits."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (raw.reshape(len(raw), -1, 1, run) >> shifts & (1 << width) - 1).flatten(1)
