"""Products with a weight, against fp64 and between batches, on shapes that straddle tiles, steps and chunks.

Bounds. A tensor core aligns the products of an instruction to the largest and truncates the rest. The error is below 2^-23
of it for each product and addition (Fasi, Higham, Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ
Computer Science 2021). A sum over the depth is then off by at most depth * 2^-22 of the sum of the products' magnitudes.
Sums rounded to nearest are off by a quarter of that (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section
3.1). Rounding to the output's format adds half a unit.

All other comparisons are equalities: the bits of a row depend on the row and the weight only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from tests.cuda.emulated import EmulatedDevice

from quintet.executor.backends.cuda.device import Argument, Device, Kernel, Size
from quintet.executor.backends.cuda.ops.linear import (
    MATVEC_ROWS,
    TILES_OF_16_BITS,
    TILES_OF_32_BITS,
    MatvecShape,
    OperandError,
    SplitMemory,
    Tile,
    choose_tile,
    chunk_units,
    matmul,
    matvec,
    matvec_parts,
    splitting_is_faster,
    tiles_of,
)

HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
DTYPES = tuple(HALF_UNIT)
ROWS = (1, 2, 3, 15, 16, 17, 64, 65, 130)
MOST_ROWS = 130
COLUMNS = 72
"""A full tile and a partial tile of columns."""
DEPTH = 2 * 256 + 24
"""Two chunks of 16-bit numbers and a third that ends within a step of every tile: see `chunk_units`."""

every_format = pytest.mark.parametrize("dtype", DTYPES)


class GridRecorder:
    """A device that records the grids of its launches and reports many multiprocessors, so that small sums are split."""

    def __init__(self, device: Device) -> None:
        self.torch_device = device.torch_device
        self.num_multiprocessors = 64
        self.max_shared_bytes = device.max_shared_bytes
        self.grids: list[Size] = []
        self._device = device

    def launch(
        self, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        self.grids.append(grid)
        self._device.launch(kernel, grid, block, args, shared_bytes)

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)


def noise(device: Device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype).to(device.torch_device)


def check(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Compare with the sum in fp64, within the bounds of the module docstring."""
    shift = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double().cpu()
    exact = x.double().cpu() @ weight.double().cpu().T + shift
    magnitudes = x.double().cpu().abs() @ weight.double().cpu().abs().T + shift.abs()
    slack = (x.shape[1] + 8) * 2.0**-22 * magnitudes
    bound = 1.01 * (slack + HALF_UNIT[y.dtype] * (exact.abs() + slack))
    error = (y.double().cpu() - exact).abs()
    worst = int((error - bound).argmax())
    assert bool((error <= bound).all()), (
        worst,
        y.flatten()[worst],
        exact.flatten()[worst],
        bound.flatten()[worst],
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@every_format
@pytest.mark.parametrize(
    ("num_rows", "columns", "depth"),
    [(1, 1, 8), (16, 64, 64), (17, 65, 72), (33, 63, 264), (5, 130, 1032), (65, 8, 136)],
)
def test_matmul(device: Device, dtype: torch.dtype, num_rows: int, columns: int, depth: int) -> None:
    x, weight = noise(device, dtype, num_rows, depth), noise(device, dtype, columns, depth, seed=1)
    bias = noise(device, dtype, columns, seed=2)
    memory = SplitMemory(device)
    check(matmul(device, x, weight), x, weight, None)
    check(matmul(device, x, weight, bias, memory=memory), x, weight, bias)


@every_format
def test_row_does_not_depend_on_the_others(device: Device, dtype: torch.dtype) -> None:
    x, weight = noise(device, dtype, MOST_ROWS, DEPTH), noise(device, dtype, COLUMNS, DEPTH, seed=1)
    bias = noise(device, dtype, COLUMNS, seed=2)
    memory = SplitMemory(device)
    whole = matmul(device, x, weight, bias)
    check(whole, x, weight, bias)
    for num_rows in ROWS:
        first = (MOST_ROWS - num_rows) // 2
        some = x[first : first + num_rows]
        assert same(matmul(device, some, weight, bias, memory=memory), whole[first : first + num_rows]), (
            num_rows
        )


@pytest.mark.parametrize(
    ("dtype", "tile"),
    [
        *((dtype, tile) for dtype in (torch.bfloat16, torch.float16) for tile in TILES_OF_16_BITS),
        *((torch.float32, tile) for tile in TILES_OF_32_BITS),
    ],
)
def test_every_tile_gives_the_same_bits_split_or_not(device: Device, dtype: torch.dtype, tile: Tile) -> None:
    num_rows, columns = (
        37,
        133,
    )  # three row tiles of the lowest tiles, a partial one of the tallest; three or two tiles of columns
    x, weight = noise(device, dtype, num_rows, DEPTH), noise(device, dtype, columns, DEPTH, seed=1)
    watched = GridRecorder(device)
    expected = matmul(device, x, weight, tile=tiles_of(dtype)[0])
    assert same(matmul(watched, x, weight, tile=tile), expected)
    memory = SplitMemory(device)
    for _ in range(2):  # the first run resets the tickets
        assert same(matmul(watched, x, weight, tile=tile, memory=memory), expected)
    assert not memory.tickets.any()
    one, *split = (grid[1] for grid in watched.grids)
    assert one == 1 and all(chunks >= 3 for chunks in split), watched.grids


@every_format
def test_any_split_memory_gives_the_same_bits(device: Device, dtype: torch.dtype) -> None:
    x, weight = noise(device, dtype, 3, DEPTH), noise(device, dtype, COLUMNS, DEPTH, seed=1)
    expected = matmul(device, x, weight)
    for memory in (SplitMemory(device, max_bytes=4), SplitMemory(device, max_tiles=1), SplitMemory(device)):
        assert same(matmul(device, x, weight, memory=memory), expected)


@every_format
def test_numbers_out_of_bounds_are_never_read(device: Device, dtype: torch.dtype) -> None:
    """NaN after the last row, the last column and the depth: a product with one would be NaN."""
    num_rows, columns, depth = 5, 9, 80
    x = torch.full((num_rows + 1, depth + 8), torch.nan, dtype=dtype, device=device.torch_device)
    weight = torch.full((columns + 1, depth), torch.nan, dtype=dtype, device=device.torch_device)
    x[:num_rows, :depth] = noise(device, dtype, num_rows, depth)
    weight[:columns] = noise(device, dtype, columns, depth, seed=1)
    check(
        matmul(device, x[:num_rows, :depth], weight[:columns]), x[:num_rows, :depth], weight[:columns], None
    )
    few = x[:MATVEC_ROWS, :depth]
    check(matvec(device, few, weight[:columns]), few, weight[:columns], None)


@every_format
@pytest.mark.parametrize("width", [70, 71])
def test_into_columns_of_a_wider_tensor(device: Device, dtype: torch.dtype, width: int) -> None:
    x, weight = noise(device, dtype, 19, 72), noise(device, dtype, 65, 72, seed=1)
    wide = torch.full((19, width), 7.0, dtype=dtype, device=device.torch_device)
    assert matmul(device, x, weight, out=wide[:, 2:67]).data_ptr() == wide[:, 2:].data_ptr()
    assert same(wide[:, 2:67], matmul(device, x, weight))
    assert bool((wide[:, :2] == 7).all()) and bool((wide[:, 67:] == 7).all())
    matvec(device, x[:3], weight, out=wide[:3, 2:67])
    assert same(wide[:3, 2:67], matvec(device, x[:3], weight))
    assert bool((wide[:, :2] == 7).all()) and bool((wide[:, 67:] == 7).all())


@every_format
@pytest.mark.parametrize(("columns", "depth"), [(1, 8), (9, 264), (7, 2056), (17, 4104)])
@pytest.mark.parametrize("num_rows", range(1, MATVEC_ROWS + 1))
def test_matvec(device: Device, dtype: torch.dtype, columns: int, depth: int, num_rows: int) -> None:
    x, weight = noise(device, dtype, num_rows, depth), noise(device, dtype, columns, depth, seed=1)
    bias = noise(device, dtype, columns, seed=2)
    y = matvec(device, x, weight, bias)
    check(y, x, weight, bias)
    check(matvec(device, x, weight), x, weight, None)
    assert same(matvec(device, x.flip(0), weight, bias).flip(0), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_results_are_the_sums(device: Device, dtype: torch.dtype) -> None:
    """Rounded, they equal the default output; for every tile, with and without a split."""
    x, weight = noise(device, dtype, 19, DEPTH), noise(device, dtype, 71, DEPTH, seed=1)
    bias, where = noise(device, dtype, 71, seed=2), device.torch_device
    for multiply, rows in ((matmul, 19), (matmul, 1), (matvec, 3)):
        wide = torch.full((rows, 75), 7.0, device=where)
        multiply(device, x[:rows], weight, bias, out=wide[:, 2:73])
        assert bool((wide[:, :2] == 7).all()) and bool((wide[:, 73:] == 7).all())
        assert same(wide[:, 2:73].to(dtype), multiply(device, x[:rows], weight, bias))
        assert not torch.equal(wide[:, 2:73], wide[:, 2:73].to(dtype).float())
    split = matmul(
        GridRecorder(device), x, weight, bias, torch.empty(19, 71, device=where), memory=SplitMemory(device)
    )
    for tile in TILES_OF_16_BITS:
        assert same(split, matmul(device, x, weight, bias, torch.empty(19, 71, device=where), tile=tile))


def test_tile_height_follows_the_rows_and_fits_the_device() -> None:
    def heights(max_shared_bytes: int) -> list[int]:
        return [
            choose_tile(rows, TILES_OF_16_BITS, max_shared_bytes).rows for rows in (1, 17, 33, 65, 130, 260)
        ]

    hopper, ampere, ada = 227 * 1024, 163 * 1024, 99 * 1024
    assert heights(hopper) == heights(ampere) == [16, 32, 64, 128, 64, 128], "130 rows: 192 instead of 256"
    assert heights(ada) == [16, 32, 64, 32, 64, 64]


def test_matrices_are_loaded_without_bank_conflicts(device: Device) -> None:
    if not isinstance(device, EmulatedDevice):
        pytest.skip("the emulator counts them")
    x, weight = noise(device, torch.bfloat16, 37, DEPTH), noise(device, torch.bfloat16, 133, DEPTH, seed=1)
    for tile in TILES_OF_16_BITS:
        matmul(device, x, weight, tile=tile)
        loads, conflicts = device.matrix_loads
        assert loads > 0 and conflicts == 0, tile


def test_few_weight_rows_are_split_between_warps() -> None:
    one, four = MatvecShape.of(1), MatvecShape.of(4)

    def parts(shape: MatvecShape, columns: int, row_bytes: int) -> int:
        return matvec_parts(shape, columns, row_bytes, num_multiprocessors=132)

    assert parts(one, 28672, 8192) == parts(four, 28672, 8192) == 1
    assert parts(one, 4096, 8192) == parts(four, 4096, 8192) == 1
    assert parts(one, 1536, 8192) == 2
    assert parts(one, 1024, 8192) == parts(four, 1024, 8192) == 4
    assert parts(one, 1024, 4096) == 2, "four would have two steps each"
    assert parts(one, 64, 2048) == 1


def test_sums_are_split_where_that_saves_a_wave() -> None:
    slots = 3 * 132
    assert splitting_is_faster(64, 4, slots), "a quarter of the multiprocessors would work"
    assert splitting_is_faster(448, 4, slots), "a second wave for an eighth of the tiles"
    assert not splitting_is_faster(2004, 4, slots)
    assert not splitting_is_faster(64, 1, slots)
    assert not splitting_is_faster(128, 4, 132)


@every_format
def test_chunks_depend_on_the_depth_only(dtype: torch.dtype) -> None:
    for depth in range(8, 20_000, 8):
        assert 1 <= -(-depth * dtype.itemsize // (128 * chunk_units(depth, dtype))) <= 4
    depths = [chunk_units(depth, dtype) for depth in range(8, 20_000, 8)]
    assert all(a <= b for a, b in pairwise(depths))


def test_no_rows(device: Device) -> None:
    weight = noise(device, torch.bfloat16, 8, 16)
    assert matmul(device, weight[:0], weight).shape == (0, 8)
    assert matvec(device, weight[:0], weight).shape == (0, 8)


def test_unsupported_inputs_are_named(device: Device) -> None:
    x, weight = noise(device, torch.bfloat16, 5, 64), noise(device, torch.bfloat16, 8, 64)
    with pytest.raises(OperandError, match=r"weight: \[8, 64\]"):
        matmul(device, x[:, :56], weight)
    with pytest.raises(OperandError, match=r"x: depth is 12 .* multiple of 8"):
        matmul(device, x[:, :12], weight[:, :12])
    with pytest.raises(OperandError, match="weight: strides"):
        matmul(device, x[:, :16], weight[:, :16])
    with pytest.raises(OperandError, match=r"x: strides are \(1, 5\)"):
        matmul(device, x.t().contiguous().t(), weight)
    with pytest.raises(OperandError, match=r"x: address is .* 16 bytes"):
        matmul(device, x[:, 4:44], weight[:, :40].contiguous())
    with pytest.raises(OperandError, match=r"weight: torch.float16 .* expected torch.bfloat16"):
        matmul(device, x, weight.half())
    with pytest.raises(OperandError, match=r"bias: \[5\]"):
        matmul(device, x, weight, x[:, 0].contiguous())
    with pytest.raises(OperandError, match=r"out: \[5, 64\]"):
        matmul(device, x, weight, out=x.clone())
    with pytest.raises(OperandError, match="out: address is not a multiple of 4"):
        matmul(device, x, weight, out=x.new_empty(5, 10)[:, 1:9])
    with pytest.raises(OperandError, match=r"x: torch.float64"):
        matmul(device, x.double(), weight.double())
    with pytest.raises(OperandError, match="5 rows; matvec supports at most 4"):
        matvec(device, x, weight)
