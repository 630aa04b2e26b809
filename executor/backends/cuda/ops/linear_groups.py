"""Grouped GEMM for experts and per-head matrices: ``csrc/cuda/linear.cu``.

Only the device knows the rows of a group. So a launch has blocks for the maximum number of tiles; blocks without rows return at
once. The bits of a row are those of `quintet.executor.backends.cuda.ops.linear.matmul` with its group's weight.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import SUFFIXES
from quintet.executor.backends.cuda.ops.linear import (
    OperandError,
    Tile,
    check_groups,
    choose_tile,
    chunk_units,
    tiles_of,
)


def tile_of(num_rows: int, num_groups: int, dtype: torch.dtype, max_shared_bytes: int) -> Tile:
    """Return the tile for the average number of rows per group. All tiles give the same bits."""
    return choose_tile(-(-num_rows // num_groups), tiles_of(dtype), max_shared_bytes)


def tiles_of_groups(ends: torch.Tensor, num_rows: int, tile_rows: int) -> torch.Tensor:
    """Return the tiles, int32 ``[3, maximum number of tiles]``: group or -1, first row, end of the group.

    ends: int64 ``[groups]``, ascending; the last is ``num_rows``.
    """
    num_groups = len(ends)
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    last = torch.cumsum((ends - begins + tile_rows - 1) // tile_rows, 0)  # cumulative number of tiles
    index = torch.arange(num_rows // tile_rows + min(num_rows, num_groups), device=ends.device)
    group = torch.searchsorted(last, index, right=True)
    owner = group.clamp(max=num_groups - 1)
    before = torch.where(owner > 0, last[(owner - 1).clamp(min=0)], 0)
    first = begins[owner] + (index - before) * tile_rows
    return torch.stack((torch.where(group < num_groups, group, -1), first, ends[owner])).int()


def grouped_matmul(
    device: Device,
    x: torch.Tensor,
    tiles: torch.Tensor,
    tile: Tile,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x[row] @ weight[group of row].T + bias[group of row]`` ``[num_rows, columns]``.

    x: ``[num_rows, depth]``, sorted by group; tiles: result of `tiles_of_groups` for ``tile``; weight: ``[groups, columns,
    depth]``; bias: ``[groups, columns]``. depth is a multiple of 16 bytes.
    """
    num_rows, depth = x.shape
    columns = weight.shape[1]
    out = x.new_empty(num_rows, columns)
    if weight.ndim != 3 or not weight.is_contiguous() or weight.shape[2] != depth or weight.dtype != x.dtype:
        raise OperandError(
            f"weight: {weight.dtype}{list(weight.shape)}; expected contiguous {x.dtype}[groups, columns, {depth}]"
        )
    if depth * x.dtype.itemsize % 16 or not x.is_contiguous() or x.data_ptr() % 16 or weight.data_ptr() % 16:
        raise OperandError(
            f"x: {list(x.shape)} of {x.dtype}; expected contiguous, 16-byte aligned tensors with a depth that is a multiple of"
            f" {16 // x.dtype.itemsize}, because kernels load 16 bytes at a time"
        )
    check_groups(tiles, bias, (len(weight), columns), x.dtype)
    if num_rows and columns:
        num_tiles = tiles.shape[1]
        device.launch(
            Kernel("linear", f"linear_groups_{tile.rows}x{tile.columns}_{SUFFIXES[x.dtype]}", "pppppiiilli"),
            (num_tiles * -(-columns // tile.columns), 1, 1),
            (tile.threads, 1, 1),
            (
                *(x, weight, bias, out, tiles, num_tiles, columns, depth, x.stride(0), out.stride(0)),
                chunk_units(depth, x.dtype),
            ),
            tile.shared_bytes,
        )
    return out


def head_matmul(device: Device, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply each head's columns of ``x [num_rows, heads * depth]`` by its matrix: ``[num_rows, heads * columns]``.

    weight: ``[heads, columns, depth]``.
    """
    heads, num_rows = len(weight), len(x)
    by_head = x.unflatten(1, (heads, -1)).transpose(0, 1).reshape(heads * num_rows, -1)
    tile = tile_of(len(by_head), heads, x.dtype, device.max_shared_bytes)
    ends = torch.arange(1, heads + 1, device=x.device) * num_rows
    y = grouped_matmul(device, by_head, tiles_of_groups(ends, len(by_head), tile.rows), tile, weight)
    return y.view(heads, num_rows, -1).transpose(0, 1).flatten(1)
