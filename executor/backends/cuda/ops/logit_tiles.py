"""The first pass over rows of logits, which drawing and reporting share: each tile's maximum and its sum of weights.

Knows how rows may lie in memory and how a launch is divided; what is made of the tiles is for `draw` and `entries`.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.device import Device, Kernel

TILE = 256
"""Logits of a tile, as in csrc/cuda/sampling.cuh."""
MAX_VOCAB_SIZE = 2560 * TILE
"""As many tiles fit beside the histogram in the 48 KiB of shared memory that every block may have."""
SCAN_WARPS = 8
"""Tiles that a block of `scan_tiles` looks at together."""

SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SCAN_TILES = {
    dtype: Kernel("sampling", f"scan_tiles_{suffix}", "plipppfpp") for dtype, suffix in SUFFIXES.items()
}


def num_tiles(vocab_size: int) -> int:
    """Return how many tiles a row has."""
    return -(-vocab_size // TILE)


def tile_scratch(device: Device, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Return memory for the tiles of so many rows: fp32 ``[2, num_rows, tiles]``, maxima and sums."""
    return torch.empty((2, num_rows, num_tiles(vocab_size)), device=device.torch_device)


def check_logits(logits: torch.Tensor) -> None:
    """Raise `ValueError` unless kernels can read these rows."""
    if logits.dim() != 2 or logits.stride(1) != 1 or logits.dtype not in SUFFIXES or not logits.shape[1]:
        raise ValueError(
            f"logits are {logits.dtype}{list(logits.shape)} with strides {logits.stride()}; expected [rows, vocab] of"
            " bfloat16, float16 or float32 with neighbouring elements in a row"
        )
    if logits.shape[1] > MAX_VOCAB_SIZE:
        raise ValueError(f"logits have {logits.shape[1]} tokens a row; kernels take at most {MAX_VOCAB_SIZE}")


def check_column(name: str, column: torch.Tensor | None, count: int, logits: torch.Tensor) -> None:
    """Raise `ValueError` unless ``column`` is contiguous int32[count] beside the logits, or None."""
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
    scratch: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill and return maxima and sums, fp32 ``[count, tiles]`` each, for ``count`` rows of checked ``logits``.

    rows: int32[count] or None for the first; settings, slots: whose temperature a row has; ``temperature`` is everyone's
    where there are none. Rows of temperature 0 get no sums; rows of slot -1 get nothing.
    """
    tiles = num_tiles(logits.shape[1])
    if scratch is None:
        scratch = tile_scratch(device, count, logits.shape[1])
    elif (
        scratch.dtype != torch.float32
        or scratch.dim() != 3
        or scratch.shape[0] != 2
        or scratch.shape[1] < count
        or scratch.shape[2] != tiles
        or not scratch.is_contiguous()
        or scratch.device != logits.device
    ):
        raise ValueError(
            f"scratch is {scratch.dtype}{list(scratch.shape)} on {scratch.device}; expected contiguous"
            f" float32[2, {count} or more, {tiles}] on {logits.device}"
        )
    # few rows: a warp per tile, so that one row is read by many multiprocessors; many: enough blocks to fill them all
    num_blocks = max(1, min(-(-tiles // SCAN_WARPS), 4 * device.num_multiprocessors // count))
    maxima, sums = scratch[0], scratch[1]
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
