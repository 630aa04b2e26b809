"""First pass over rows of logits, shared by `draw` and `entries`: maximum and sum of weights of each tile."""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import SUFFIXES

TILE = 256
"""Logits per tile, as in csrc/cuda/sampling.cuh."""
MAX_VOCAB_SIZE = 2560 * TILE
"""Limited by the tiles that fit, with the histogram, in 48 KiB of shared memory."""
SCAN_WARPS = 8
"""Tiles that a block of `scan_tiles` processes at a time, one per warp."""

SCAN_TILES = {
    dtype: Kernel("sampling", f"scan_tiles_{suffix}", "plipppfpp") for dtype, suffix in SUFFIXES.items()
}


def num_tiles(vocab_size: int) -> int:
    """Return the number of tiles of a row."""
    return -(-vocab_size // TILE)


def check_logits(logits: torch.Tensor) -> None:
    """Raise `ValueError` for unsupported logits."""
    if logits.dim() != 2 or logits.stride(1) != 1 or logits.dtype not in SUFFIXES or not logits.shape[1]:
        raise ValueError(
            f"logits are {logits.dtype}{list(logits.shape)} with strides {logits.stride()}; expected [rows, vocab] of"
            " bfloat16, float16 or float32 with contiguous rows"
        )
    if logits.shape[1] > MAX_VOCAB_SIZE:
        raise ValueError(f"logits have {logits.shape[1]} columns; kernels support at most {MAX_VOCAB_SIZE}")


def check_column(name: str, column: torch.Tensor | None, count: int, logits: torch.Tensor) -> None:
    """Raise `ValueError` unless ``column`` is None or contiguous int32[count] on the logits' device."""
    if column is None:
        return
    if (
        column.dtype != torch.int32
        or column.shape != (count,)
        or not column.is_contiguous()
        or column.device != logits.device
    ):
        raise ValueError(
            f"{name} is {column.dtype}{list(column.shape)} on {column.device}; expected contiguous int32[{count}] on"
            f" {logits.device}"
        )


def scan_tiles(
    device: Device,
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    settings: torch.Tensor | None,
    slots: torch.Tensor | None,
    count: int,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute maxima and sums, fp32 ``[count, tiles]`` each, for ``count`` rows of checked ``logits``.

    rows: int32[count], or None for the first rows. settings, slots: give each row's temperature; without them, ``temperature``
    applies to all rows. Rows with temperature 0 get no sums; rows with slot -1 get neither.
    """
    tiles = num_tiles(logits.shape[1])
    # few rows: a warp per tile, so that many multiprocessors read a row; many rows: enough blocks to fill the device
    num_blocks = max(1, min(-(-tiles // SCAN_WARPS), 4 * device.num_multiprocessors // count))
    maxima, sums = torch.empty((2, count, tiles), device=device.torch_device)
    device.launch(
        SCAN_TILES[logits.dtype],
        (num_blocks, count, 1),
        (32 * SCAN_WARPS, 1, 1),
        (
            *(logits, logits.stride(0), logits.shape[1], rows),
            *(settings, slots, temperature, maxima, sums),
        ),
    )
    return maxima, sums
