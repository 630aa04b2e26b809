"""GEMM with quantized weights: ``csrc/cuda/linear_coded.cu``, and torch references.

The order of summation is the same for any number of rows, so the bits of a row depend only on that row and the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from quintet.executor.backends.cuda.device import Argument, Device, Kernel
from quintet.executor.backends.cuda.ops.coded_weight import (
    TILE_COLUMNS,
    Code,
    CodedWeight,
)
from quintet.executor.backends.cuda.ops.linear import (
    CHUNK_UNIT,
    OperandError,
    SplitMemory,
    check_groups,
    check_rows,
    chunk_units,
    splitting_is_faster,
)

SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

STEP_BYTES = 128
"""Bytes of a row of x per stage."""
MAX_RUNS = 4
"""Maximum number of runs per step of csrc/cuda/linear_coded.cu; a stage holds their scales, minima and zeros."""


@dataclass(frozen=True, slots=True)
class CodedTile:
    """Tile of one block: ``rows`` by 64 columns."""

    rows: int
    stages: int
    max_resident: int
    """Resident blocks per multiprocessor by registers, as compiled."""
    threads: int = 128

    def shared_bytes(self, code: Code) -> int:
        """Dynamic shared memory of a block: stages, and sums of chunks."""
        by_run = TILE_COLUMNS * (4 + 4 + 1)
        codes = TILE_COLUMNS * 64 * code.bits // 8
        return (
            self.rows * STEP_BYTES + codes + MAX_RUNS * by_run
        ) * self.stages + self.rows * TILE_COLUMNS * 4


TILES = (CodedTile(16, 8, 3), CodedTile(32, 6, 3), CodedTile(64, 4, 2))


def coded_matmul_reference(
    x: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None = None,
    result_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `coded_matmul`: dequantized in fp32, summed in fp32, rounded once to ``result_dtype`` or x's dtype."""
    y = x.float() @ weight.floats().t()
    return (y if bias is None else y + bias.float()).to(result_dtype or x.dtype)


def tile_for(num_rows: int) -> CodedTile:
    """Return the smallest tile that holds the rows, or the largest. All give the same bits."""
    return next((tile for tile in TILES if num_rows <= tile.rows), TILES[-1])


def coded_matmul(
    device: Device,
    x: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    memory: SplitMemory | None = None,
    tile: CodedTile | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` ``[num_rows, columns]``, summed in fp32 and rounded once; unrounded if ``out`` is fp32.

    x: ``[num_rows, depth]``, bf16 or fp16, rows contiguous; depth is a multiple of 16 bytes; bias: ``[columns]``. memory: None
    disables splitting. The bits of a result row depend only on that row of x and the weight, not on num_rows, ``memory`` or
    ``tile``.
    """
    layout = weight.layout
    if x.dtype not in SUFFIXES or x.dim() != 2 or x.shape[1] != layout.depth or weight.count is not None:
        raise OperandError(
            f"x: {x.dtype}{list(x.shape)}; expected {' or '.join(map(str, SUFFIXES))} [num_rows, {layout.depth}] and a"
            " single weight"
        )
    out = check_rows(device, x, layout.columns, bias, out)
    num_rows = len(x)
    if num_rows == 0:
        return out
    if tile is None:
        tile = tile_for(num_rows)
    tiles = -(-num_rows // tile.rows) * (layout.width // TILE_COLUMNS)
    units = chunk_units(layout.depth, x.dtype)
    chunks = -(-layout.depth * x.dtype.itemsize // (units * CHUNK_UNIT))
    shared_bytes = tile.shared_bytes(layout.code)
    resident = max(1, min(tile.max_resident, device.max_shared_bytes // (shared_bytes + 1024)))
    is_split = (
        memory is not None
        and memory.holds(tiles, tiles * chunks * tile.rows * TILE_COLUMNS)
        and splitting_is_faster(tiles, chunks, device.num_multiprocessors * resident)
    )
    split = (memory.partials, memory.tickets) if memory is not None else (None, None)
    device.launch(
        _kernel(tile, layout.code, x.dtype),
        (tiles, chunks if is_split else 1, 1),
        (tile.threads, 1, 1),
        (x, *_operands(weight), bias, out, *split, None, num_rows, *_sizes(weight, x, out)),
        shared_bytes,
    )
    return out


def coded_grouped_matmul(
    device: Device,
    x: torch.Tensor,
    tiles: torch.Tensor,
    tile: CodedTile,
    weight: CodedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x[row] @ weight[group of row].T + bias[group of row]`` ``[num_rows, columns]``.

    x: ``[num_rows, depth]``, sorted by group; tiles: result of `linear_groups.tiles_of_groups` for ``tile``'s rows; bias:
    ``[groups, columns]``. The bits of a row are those of `coded_matmul` with its group's weight.
    """
    layout, count = weight.layout, weight.count
    if x.dtype not in SUFFIXES or x.dim() != 2 or x.shape[1] != layout.depth or count is None:
        raise OperandError(
            f"x: {x.dtype}{list(x.shape)}; expected {' or '.join(map(str, SUFFIXES))} [num_rows, {layout.depth}] and one"
            " weight per group"
        )
    out = check_rows(device, x, layout.columns, None, None)
    check_groups(tiles, bias, (count, layout.columns), x.dtype)
    if len(x):
        num_tiles = tiles.shape[1]
        device.launch(
            _kernel(tile, layout.code, x.dtype),
            (num_tiles * (layout.width // TILE_COLUMNS), 1, 1),
            (tile.threads, 1, 1),
            (x, *_operands(weight), bias, out, None, None, tiles, num_tiles, *_sizes(weight, x, out)),
            tile.shared_bytes(layout.code),
        )
    return out


@cache
def _kernel(tile: CodedTile, code: Code, dtype: torch.dtype) -> Kernel:
    name = f"coded_{tile.rows}x{TILE_COLUMNS}_{code}_{SUFFIXES[dtype]}"
    return Kernel("linear_coded", name, "p" * 10 + "iiilliiiii")


def _operands(weight: CodedWeight) -> tuple[torch.Tensor | None, ...]:
    return weight.codes, weight.scales, weight.zeros, weight.minima


def _sizes(weight: CodedWeight, x: torch.Tensor, out: torch.Tensor) -> tuple[Argument, ...]:
    layout = weight.layout
    return (
        *(layout.columns, layout.depth, x.stride(0), out.stride(0), chunk_units(layout.depth, x.dtype)),
        *(layout.width, layout.run_shift, layout.group_shift, int(out.dtype == torch.float32)),
    )
