"""GEMM and GEMV of unquantized weights: ``csrc/cuda/linear.cu`` and ``linear_matvec.cu``.

Owns the tiling and the split of the depth. The reference is `quintet.executor.backends.cpu.ops.linear.linear`.
`quintet.executor.backends.cuda.gemm_dispatch` selects between these kernels and cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from quintet.executor.backends.cuda.device import Device, Kernel, Size
from quintet.executor.backends.cuda.ops.formats import SUFFIXES

CHUNK_UNIT = 128
"""Unit of a chunk in bytes of a row of x or of the weight; as in csrc/cuda/linear_tile.cuh."""

MAX_CHUNKS = 4
"""Maximum number of depth chunks (split-K): enough blocks for few tokens, with a cheap final sum."""

MIN_CHUNK_UNITS = 4
"""Minimum chunk; a shorter one ends before its copies are in flight."""

MATVEC_ROWS = 4
"""Maximum number of rows of x for `matvec`."""

MATVEC_WARPS = 4
MATVEC_STEP_BYTES = 512
"""Bytes of a row of the weight per stage: 16 per lane."""

MIN_MATVEC_STEPS = 4
"""Minimum number of steps per warp, to keep copies in flight."""

_MATVECS = {
    (rows, dtype): Kernel("linear_matvec", f"matvec_{rows}_{suffix}", "ppppiillii")
    for rows in range(1, MATVEC_ROWS + 1)
    for dtype, suffix in SUFFIXES.items()
}

SATURATING_BYTES = 64 << 10
"""Bytes in flight per multiprocessor that saturate its bandwidth; 1.5 times the bandwidth-latency product."""


class OperandError(ValueError):
    """Unsupported tensor; the message names it and the expected form."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of one block of ``csrc/cuda/linear.cu``."""

    rows: int
    columns: int
    threads: int
    stages: int
    step_bytes: int
    """Bytes of a row of x or of the weight per stage."""
    max_resident: int
    """Resident blocks per multiprocessor by registers, as compiled."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: stages, and sums of chunks."""
        return (self.rows + self.columns) * self.step_bytes * self.stages + self.rows * self.columns * 4


TILES_OF_16_BITS = (
    Tile(16, 64, 128, 6, 128, 3),
    Tile(32, 64, 128, 5, 128, 3),
    Tile(64, 64, 128, 3, 128, 3),
    Tile(128, 128, 128, 3, 64, 2),
)
TILES_OF_32_BITS = (Tile(16, 64, 128, 4, 128, 3), Tile(64, 64, 256, 3, 128, 2))


@dataclass(frozen=True, slots=True)
class MatvecShape:
    """Work of a warp of ``csrc/cuda/linear_matvec.cu`` per iteration."""

    rows: int
    """Rows of the weight."""
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return MATVEC_WARPS * self.stages * self.rows * MATVEC_STEP_BYTES

    @classmethod
    def of(cls, num_rows: int) -> MatvecShape:
        """Return the shape for a number of rows of x. More rows of x use more rows of the weight, to reuse x."""
        return cls(2, 8) if num_rows <= 2 else cls(4, 6)


class SplitMemory:
    """Partial sums of split products, combined by the last block.

    Launches in one stream share it, because each resets the tickets to zero. Concurrent launches must not share it.
    """

    def __init__(self, device: Device, max_bytes: int = 32 << 20, max_tiles: int = 4096) -> None:
        """Allocate. A product that needs more memory is not split, which is slower but gives the same bits."""
        self.partials = torch.empty(max_bytes // 4, dtype=torch.float32, device=device.torch_device)
        self.tickets = torch.zeros(max_tiles, dtype=torch.int32, device=device.torch_device)
        self.capacity = (max_tiles, max_bytes // 4)
        """Maximum number of tiles and of partial sums of a split product."""

    def holds(self, tiles: int, partials: int) -> bool:
        """Return whether a split product of this many tiles and partial sums fits."""
        return tiles <= self.capacity[0] and partials <= self.capacity[1]


def tiles_of(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles for a dtype; all give the same bits."""
    return TILES_OF_32_BITS if dtype == torch.float32 else TILES_OF_16_BITS


def chunk_units(depth: int, dtype: torch.dtype) -> int:
    """Return the length of a depth chunk, in units of 128 bytes of a row. The bits of a result depend on it."""
    units = _ceil(depth * dtype.itemsize, CHUNK_UNIT)
    return max(MIN_CHUNK_UNITS, _ceil(units, MAX_CHUNKS))


def matmul(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    memory: SplitMemory | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` ``[num_rows, columns]``, summed in fp32 and rounded once; unrounded if ``out`` is fp32.

    x: ``[num_rows, depth]``, bf16, fp16 or fp32, rows contiguous; weight: contiguous ``[columns, depth]``; bias: ``[columns]``;
    all of one dtype. out: of that dtype or fp32. depth is a multiple of 16 bytes. memory: None disables splitting. The bits of a
    result row depend only on that row of x and the weight, not on num_rows, ``memory`` or ``tile``.
    """
    (num_rows, depth), columns = x.shape, weight.shape[0]
    out = _checked_output(device, x, weight, bias, out)
    if num_rows == 0 or columns == 0:
        return out
    capacity = (0, 0) if memory is None else memory.capacity
    split = (None, None) if memory is None else (memory.partials, memory.tickets)
    sizes = (num_rows, columns, depth, x.dtype, tile)
    launch = _matmul_launch(*sizes, device.num_multiprocessors, device.max_shared_bytes, capacity)
    device.launch(
        launch.kernel,
        launch.grid,
        launch.block,
        (
            *(x, weight, bias, out, *split, num_rows, columns, depth),
            *(x.stride(0), out.stride(0), launch.units, int(out.dtype == torch.float32)),
        ),
        launch.shared_bytes,
    )
    return out


@dataclass(frozen=True, slots=True)
class _Launch:
    """Launch parameters of `matmul` for given sizes."""

    kernel: Kernel
    grid: Size
    block: Size
    shared_bytes: int
    units: int
    """Length of a depth chunk."""


@lru_cache(maxsize=4096)
def _matmul_launch(
    num_rows: int,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    tile: Tile | None,
    num_multiprocessors: int,
    max_shared_bytes: int,
    capacity: tuple[int, int],
) -> _Launch:
    """Select tile and split by sizes only. capacity: tiles and partial sums of the split memory."""
    if tile is None:
        tile = choose_tile(num_rows, tiles_of(dtype), max_shared_bytes)
    tiles = _ceil(num_rows, tile.rows) * _ceil(columns, tile.columns)
    units = chunk_units(depth, dtype)
    chunks = _ceil(depth * dtype.itemsize, units * CHUNK_UNIT)
    resident = min(tile.max_resident, max_shared_bytes // (tile.shared_bytes + 1024))
    is_split = (
        tiles <= capacity[0]
        and tiles * chunks * tile.rows * tile.columns <= capacity[1]
        and splitting_is_faster(tiles, chunks, num_multiprocessors * max(1, resident))
    )
    kernel = Kernel("linear", f"linear_{tile.rows}x{tile.columns}_{SUFFIXES[dtype]}", "ppppppiiillii")
    return _Launch(
        kernel, (tiles, chunks if is_split else 1, 1), (tile.threads, 1, 1), tile.shared_bytes, units
    )


def matvec(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` for at most `MATVEC_ROWS` rows of x, at the memory bandwidth of the weight.

    Operands as in `matmul`. The order of summation differs: it depends on the number of rows and on the device.
    """
    (num_rows, depth), columns = x.shape, weight.shape[0]
    out = _checked_output(device, x, weight, bias, out)
    if num_rows > MATVEC_ROWS:
        raise OperandError(f"x: {num_rows} rows; matvec supports at most {MATVEC_ROWS}, use matmul")
    if num_rows == 0 or columns == 0:
        return out
    shape = MatvecShape.of(num_rows)
    parts = matvec_parts(shape, columns, depth * x.dtype.itemsize, device.num_multiprocessors)
    device.launch(
        _MATVECS[num_rows, x.dtype],
        (_ceil(columns, MATVEC_WARPS // parts * shape.rows), 1, 1),
        (32 * MATVEC_WARPS, 1, 1),
        (
            *(x, weight, bias, out, columns, depth),
            *(x.stride(0), out.stride(0), parts, int(out.dtype == torch.float32)),
        ),
        shape.shared_bytes,
    )
    return out


def choose_tile(num_rows: int, tiles: tuple[Tile, ...], max_shared_bytes: int) -> Tile:
    """Return the smallest tile that holds all rows. For more rows, the largest, or the second largest if it pads much less."""
    usable = [tile for tile in tiles if tile.shared_bytes <= max_shared_bytes]
    for tile in usable:
        if num_rows <= tile.rows:
            return tile
    lower, highest = usable[-2:]
    padded, padded_lower = (_ceil(num_rows, tile.rows) * tile.rows for tile in (highest, lower))
    return lower if 5 * padded_lower < 4 * padded else highest


def splitting_is_faster(tiles: int, chunks: int, slots: int) -> bool:
    """Return whether to compute the chunks of ``tiles`` sums in parallel, on a device with ``slots`` resident blocks.

    Compares waves of chunks. The final sum of a split is assumed to take one fifth of a chunk's time.
    """
    sequential = _ceil(tiles, slots) * chunks
    parallel = _ceil(tiles * chunks, slots)
    return 6 * parallel < 5 * sequential


def matvec_parts(shape: MatvecShape, columns: int, row_bytes: int, num_multiprocessors: int) -> int:
    """Return the number of warps that share a row of the weight: enough to fill the device, with a few steps each."""
    warp_bytes = (shape.stages - 1) * shape.rows * MATVEC_STEP_BYTES
    in_flight = _ceil(columns, shape.rows) * warp_bytes
    parts = 1
    while (
        parts < MATVEC_WARPS
        and in_flight * parts < SATURATING_BYTES * num_multiprocessors
        and row_bytes >= 2 * parts * MIN_MATVEC_STEPS * MATVEC_STEP_BYTES
    ):
        parts *= 2
    return parts


def _checked_output(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``out`` or a new tensor; raise `OperandError` for unsupported operands if the device checks arguments."""
    if not device.checks_arguments:
        return x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    if x.dtype not in SUFFIXES:
        raise OperandError(f"x: {x.dtype}; expected one of {', '.join(map(str, SUFFIXES))}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise OperandError(
            f"x: {list(x.shape)}, weight: {list(weight.shape)}; expected [num_rows, depth] and [columns, depth]"
        )
    out = check_rows(device, x, weight.shape[0], bias, out)
    if not weight.is_contiguous():
        raise OperandError(f"weight: strides {weight.stride()}; expected {(x.shape[1], 1)}")
    if weight.dtype != x.dtype or weight.device.type != device.torch_device.type:
        raise OperandError(
            f"weight: {weight.dtype} on {weight.device}; expected {x.dtype} like x, on {device.torch_device}"
        )
    if weight.data_ptr() % 16:
        raise OperandError(f"weight: address is {weight.data_ptr():#x}; expected a multiple of 16 bytes")
    return out


def check_rows(
    device: Device, x: torch.Tensor, columns: int, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Return ``out`` or a new tensor for ``x [num_rows, depth]`` times a weight of ``columns``.

    Raises `OperandError` for unsupported x, bias or out, if the device checks arguments.
    """
    num_rows, depth = x.shape
    if not device.checks_arguments:
        return x.new_empty(num_rows, columns) if out is None else out
    if depth == 0 or depth * x.dtype.itemsize % 16:
        raise OperandError(
            f"x: depth is {depth} of {x.dtype}; expected a multiple of {16 // x.dtype.itemsize}, because kernels load"
            " 16 bytes at a time"
        )
    if out is None:
        out = x.new_empty(num_rows, columns)
    elif out.shape != (num_rows, columns) or out.stride(1) != 1:
        raise OperandError(
            f"out: {list(out.shape)} with strides {out.stride()}; expected {[num_rows, columns]} with contiguous rows"
        )
    elif out.data_ptr() % 4:
        raise OperandError("out: address is not a multiple of 4 bytes, which kernels need to write pairs")
    if x.stride(1) != 1 or (num_rows > 1 and x.stride(0) * x.dtype.itemsize % 16):
        raise OperandError(f"x: strides are {x.stride()}; expected contiguous rows aligned to 16 bytes")
    if bias is not None and (bias.shape != (columns,) or not bias.is_contiguous()):
        raise OperandError(
            f"bias: {list(bias.shape)}, strides {bias.stride()}; expected {[columns]}, contiguous"
        )
    for name, tensor in (("x", x), ("bias", bias), ("out", out)):
        is_wide = name == "out" and out.dtype == torch.float32
        if tensor is not None and (
            (tensor.dtype != x.dtype and not is_wide) or tensor.device.type != device.torch_device.type
        ):
            raise OperandError(
                f"{name}: {tensor.dtype} on {tensor.device}; expected {x.dtype} like x, on {device.torch_device}"
            )
    if x.data_ptr() % 16:
        raise OperandError(f"x: address is {x.data_ptr():#x}; expected a multiple of 16 bytes")
    return out


def check_groups(
    tiles: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Raise `OperandError` for unsupported tiles or bias of a grouped product. shape: of the bias."""
    if bias is not None and (bias.shape != shape or not bias.is_contiguous() or bias.dtype != dtype):
        raise OperandError(f"bias: {bias.dtype}{list(bias.shape)}; expected contiguous {dtype}{list(shape)}")
    if tiles.dtype != torch.int32 or tiles.ndim != 2 or len(tiles) != 3 or not tiles.is_contiguous():
        raise OperandError(
            f"tiles: {tiles.dtype}{list(tiles.shape)}; expected contiguous torch.int32[3, tiles]"
        )


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
