"""Multiplying by a weight with our own kernels: ``csrc/cuda/linear.cu`` and ``linear_matvec.cu``.

Owns how a product is cut into blocks. The reference is `quintet.executor.backends.cpu.ops.linear.linear`. Does not
know when our kernels are worth more than cuBLAS: `quintet.executor.backends.cuda.gemm_dispatch` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from quintet.executor.backends.cuda.device import Device, Kernel, Size

SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

CHUNK_UNIT = 128
"""Bytes of a row of x or of the weight, of which chunks are multiples. As csrc/cuda/linear_tile.cuh has it."""

MAX_CHUNKS = 4
"""Pieces of the depth that are summed apart: enough blocks for few tokens, and little to add up afterwards."""

MIN_CHUNK_UNITS = 4
"""A shorter chunk ends before its copies are under way."""

MATVEC_ROWS = 4
"""`matvec` takes at most so many rows of x."""

MATVEC_WARPS = 4
MATVEC_STEP_BYTES = 512
"""Of a row of the weight, in one stage: 16 for each lane."""

MIN_MATVEC_STEPS = 4
"""Fewer are over before they are under way."""

_MATVECS = {
    (rows, dtype): Kernel("linear_matvec", f"matvec_{rows}_{suffix}", "ppppiillii")
    for rows in range(1, MATVEC_ROWS + 1)
    for dtype, suffix in SUFFIXES.items()
}

BYTES_THAT_FILL = 64 << 10
"""Under way on a multiprocessor, beyond which its bandwidth does not grow: half as much again as latency asks for."""


class OperandError(ValueError):
    """A tensor that a kernel cannot take; the message names it and what was expected."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one block of ``csrc/cuda/linear.cu`` computes, and how."""

    rows: int
    columns: int
    threads: int
    stages: int
    step_bytes: int
    """Of a row of x or of the weight, in one stage."""
    max_resident: int
    """Blocks that a multiprocessor's registers let in at once, as the kernel is compiled for."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: its stages, and the sums of its chunks."""
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
    """What a warp of ``csrc/cuda/linear_matvec.cu`` does at a time."""

    rows: int
    """Of the weight."""
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return MATVEC_WARPS * self.stages * self.rows * MATVEC_STEP_BYTES

    @classmethod
    def of(cls, num_rows: int) -> MatvecShape:
        """Return the one for so many rows of x: more rows of the weight where each takes more from x."""
        return cls(2, 8) if num_rows <= 2 else cls(4, 6)


class SplitMemory:
    """Where blocks that each do a part of a sum leave it for the last one.

    Launches in one stream may share one: each leaves the tickets at zero. Launches that may overlap may not.
    """

    def __init__(self, device: Device, max_bytes: int = 32 << 20, max_tiles: int = 4096) -> None:
        """A product that needs more is not split: slower, the same bits."""
        self.partials = torch.empty(max_bytes // 4, dtype=torch.float32, device=device.torch_device)
        self.tickets = torch.zeros(max_tiles, dtype=torch.int32, device=device.torch_device)
        self._room = (max_tiles, max_bytes // 4)

    @property
    def room(self) -> tuple[int, int]:
        """Tiles, and numbers in all, that a split product may have."""
        return self._room

    def holds(self, tiles: int, partials: int) -> bool:
        """Whether so many tiles, with so many numbers in all, can be split."""
        return tiles <= self._room[0] and partials <= self._room[1]


def tiles_of(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles that there are for a number format. All give the same bits."""
    return TILES_OF_32_BITS if dtype == torch.float32 else TILES_OF_16_BITS


def chunk_units(depth: int, dtype: torch.dtype) -> int:
    """Return the length of a chunk of the sum, in 128 bytes of a row. Part of what a result's bits depend on."""
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
    """Return ``x @ weight.T + bias`` ``[num_rows, columns]``, summed in fp32 and rounded once, or not where ``out`` is fp32.

    x: ``[num_rows, depth]``, bf16, fp16 or fp32, rows contiguous; weight: ``[columns, depth]``, contiguous; bias:
    ``[columns]``; all of one dtype. out: of that dtype, or fp32. depth is a multiple of 16 bytes. The bits of a row of the
    result depend on that row of x and the weight only: not on num_rows, ``memory`` (without it no sum is split) or ``tile``.
    """
    (num_rows, depth), columns = x.shape, weight.shape[0]
    out = _checked_output(device, x, weight, bias, out)
    if num_rows == 0 or columns == 0:
        return out
    room = (0, 0) if memory is None else memory.room
    sizes = (num_rows, columns, depth, x.dtype, tile)
    launch = _matmul_launch(*sizes, device.num_multiprocessors, device.max_shared_bytes, room)
    device.launch(
        launch.kernel,
        launch.grid,
        launch.block,
        (
            x,
            weight,
            bias,
            out,
            memory.partials if memory is not None else None,
            memory.tickets if memory is not None else None,
            num_rows,
            columns,
            depth,
            x.stride(0),
            out.stride(0),
            launch.units,
            int(out.dtype == torch.float32),
        ),
        launch.shared_bytes,
    )
    return out


@dataclass(frozen=True, slots=True)
class _Launch:
    """How `matmul` launches for some sizes."""

    kernel: Kernel
    grid: Size
    block: Size
    shared_bytes: int
    units: int
    """Of a chunk of the depth."""


@lru_cache(maxsize=4096)
def _matmul_launch(
    num_rows: int,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    tile: Tile | None,
    num_multiprocessors: int,
    max_shared_bytes: int,
    room: tuple[int, int],
) -> _Launch:
    """Decide tile and split by sizes alone. room: tiles and partial sums that the split memory holds."""
    if tile is None:
        tile = choose_tile(num_rows, tiles_of(dtype), max_shared_bytes)
    tiles = _ceil(num_rows, tile.rows) * _ceil(columns, tile.columns)
    units = chunk_units(depth, dtype)
    chunks = _ceil(depth * dtype.itemsize, units * CHUNK_UNIT)
    resident = min(tile.max_resident, max_shared_bytes // (tile.shared_bytes + 1024))
    is_split = (
        tiles <= room[0]
        and tiles * chunks * tile.rows * tile.columns <= room[1]
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
    """Return ``x @ weight.T + bias`` for at most `MATVEC_ROWS` rows of x, as fast as the weight can be read.

    Operands as for `matmul`. Summed in another order, which depends on the number of rows and on the device.
    """
    (num_rows, depth), columns = x.shape, weight.shape[0]
    out = _checked_output(device, x, weight, bias, out)
    if num_rows > MATVEC_ROWS:
        raise OperandError(f"x: {num_rows} rows; matvec takes at most {MATVEC_ROWS}, matmul any number")
    if num_rows == 0 or columns == 0:
        return out
    shape = MatvecShape.of(num_rows)
    parts = matvec_parts(shape, columns, depth * x.dtype.itemsize, device.num_multiprocessors)
    device.launch(
        _MATVECS[num_rows, x.dtype],
        (_ceil(columns, MATVEC_WARPS // parts * shape.rows), 1, 1),
        (32 * MATVEC_WARPS, 1, 1),
        (
            x,
            weight,
            bias,
            out,
            columns,
            depth,
            x.stride(0),
            out.stride(0),
            parts,
            int(out.dtype == torch.float32),
        ),
        shape.shared_bytes,
    )
    return out


def choose_tile(num_rows: int, tiles: tuple[Tile, ...], max_shared_bytes: int) -> Tile:
    """Return the lowest tile that holds all rows; beyond the highest, that one, or the one below where it pads much less."""
    fitting = [tile for tile in tiles if tile.shared_bytes <= max_shared_bytes]
    for tile in fitting:
        if num_rows <= tile.rows:
            return tile
    lower, highest = fitting[-2:]
    padded, padded_lower = (_ceil(num_rows, tile.rows) * tile.rows for tile in (highest, lower))
    return lower if 5 * padded_lower < 4 * padded else highest


def splitting_is_faster(tiles: int, chunks: int, slots: int) -> bool:
    """Whether the chunks of ``tiles`` sums should run side by side on a device that runs ``slots`` blocks at once.

    Compares the rounds, in chunks; writing and adding what the blocks leave is taken for a fifth of a chunk's time.
    """
    in_turn = _ceil(tiles, slots) * chunks
    side_by_side = _ceil(tiles * chunks, slots)
    return 6 * side_by_side < 5 * in_turn


def matvec_parts(shape: MatvecShape, columns: int, row_bytes: int, num_multiprocessors: int) -> int:
    """Return how many warps share rows of a weight: enough to fill the device, while each has a few steps."""
    of_warp = (shape.stages - 1) * shape.rows * MATVEC_STEP_BYTES
    under_way = _ceil(columns, shape.rows) * of_warp
    parts = 1
    while (
        parts < MATVEC_WARPS
        and under_way * parts < BYTES_THAT_FILL * num_multiprocessors
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
    """Return where the result goes: ``out``, or a new tensor; raise `OperandError` where the device checks arguments."""
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
            f"weight: {weight.dtype} on {weight.device}; expected {x.dtype}, as x, on {device.torch_device}"
        )
    if weight.data_ptr() % 16:
        raise OperandError(f"weight: begins at {weight.data_ptr():#x}; expected a multiple of 16 bytes")
    return out


def check_rows(
    device: Device, x: torch.Tensor, columns: int, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Return where ``x [num_rows, depth]`` times a weight of so many columns goes: ``out``, or a new tensor.

    Raises `OperandError` for rows, a bias or a place that kernels cannot take, where the device checks arguments.
    """
    num_rows, depth = x.shape
    if not device.checks_arguments:
        return x.new_empty(num_rows, columns) if out is None else out
    if depth == 0 or depth * x.dtype.itemsize % 16:
        raise OperandError(
            f"x: depth {depth} of {x.dtype}; kernels read 16 bytes at a time: a multiple of"
            f" {16 // x.dtype.itemsize} is needed"
        )
    if out is None:
        out = x.new_empty(num_rows, columns)
    elif out.shape != (num_rows, columns) or out.stride(1) != 1:
        raise OperandError(
            f"out: {list(out.shape)} with strides {out.stride()}; expected {[num_rows, columns]}, rows contiguous"
        )
    elif out.data_ptr() % 4:
        raise OperandError("out: begins at an odd number; pairs are written: expected a multiple of 4 bytes")
    if x.stride(1) != 1 or (num_rows > 1 and x.stride(0) * x.dtype.itemsize % 16):
        raise OperandError(f"x: strides {x.stride()}; expected contiguous rows, a multiple of 16 bytes apart")
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
                f"{name}: {tensor.dtype} on {tensor.device}; expected {x.dtype}, as x, on {device.torch_device}"
            )
    if x.data_ptr() % 16:
        raise OperandError(f"x: begins at {x.data_ptr():#x}; expected a multiple of 16 bytes")
    return out


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
