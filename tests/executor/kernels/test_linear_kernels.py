"""Packed weights against torch in fp64, on shapes that straddle tiles and panels, in every format and instruction set.

Bounds. Sums of K products in fp32 are off by at most K 2^-24 of the sum of the products' magnitudes (Higham, Accuracy and
Stability of Numerical Algorithms, 2002, section 3.1), in practice by the square root of that. Rounding to the output dtype
adds half a unit of the result, and once more for a residual. Integer weights are compared with their dequantized numbers; x
in 16 bits is off by at most 2^-16 of its group's largest magnitude, in 8 bits by 2^-8 of its row's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.executor.kernels.instruction_sets import MATRIX_UNITS, instruction_sets, isa

from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.backends.cpu.ops.host_linear import Inputs, LinearLibrary, WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.linear import GatedActivation, linear
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight, PackedWeightError
from quintet.executor.backends.cpu.program.library import ProgramLibrary, program_library
from quintet.executor.backends.cpu.program.step import CStep

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

FLOATS = {
    torch.bfloat16: WeightFormat.BF16,
    torch.float16: WeightFormat.FP16,
    torch.float32: WeightFormat.FP32,
}
HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
INTEGERS = [
    (WeightFormat.INT8, 0),
    (WeightFormat.INT8, 32),
    (WeightFormat.INT8, 128),
    (WeightFormat.INT4, 32),
    (WeightFormat.INT4, 64),
    (WeightFormat.INT4, 128),
    (WeightFormat.INT4_ZEROS, 128),
    (WeightFormat.INT8_ZEROS, 64),
]
SHAPES = [(1, 1), (63, 2), (64, 3), (65, 63), (100, 127), (64, 128), (130, 129), (16, 896)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 12, 13, 37, 191, 193, 196]

floats = pytest.mark.parametrize("dtype", FLOATS)
integers = pytest.mark.parametrize(("weight_format", "group"), INTEGERS)
shapes = pytest.mark.parametrize(("columns", "depth"), SHAPES)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this number of threads."""
    set_threads(request.param)
    yield request.param
    set_threads(1)


def set_threads(count: int) -> None:
    library = open_library()
    assert library is not None
    declare(library, "qt_set_threads", ctypes.c_int, ctypes.c_int)(count, 0)


def kernels() -> LinearLibrary:
    library = linear_library()
    assert library is not None
    return library


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack(
    weight: torch.Tensor, weight_format: WeightFormat | None = None, group: int = 0, paired: bool = False
) -> PackedWeight:
    chosen = FLOATS[weight.dtype] if weight_format is None else weight_format
    packed = PackedWeight(kernels(), chosen, *weight.shape, group=group, paired=paired)
    packed.fill(weight)
    return packed


def magnitudes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the sums of the products' magnitudes: errors of sums are relative to them."""
    return x.double().abs() @ weight.double().abs().T


def check(out: torch.Tensor, exact: torch.Tensor, noise_of_sums: torch.Tensor, roundings: int = 1) -> None:
    """``exact``: in fp64; ``noise_of_sums``: error of a sum before it is rounded."""
    error = (out.double() - exact).abs()
    bound = 1.01 * (noise_of_sums + roundings * HALF_UNIT[out.dtype] * (exact.abs() + noise_of_sums)) + 1e-7
    worst = int((error - bound).argmax())
    assert bool((error <= bound).all()), (out.flatten()[worst], exact.flatten()[worst], worst)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@floats
@shapes
def test_linear(dtype: torch.dtype, columns: int, depth: int) -> None:
    weight, bias = noise(columns, depth, dtype=dtype), noise(columns, dtype=dtype, seed=2)
    packed = pack(weight)
    assert torch.equal(bits(packed.read().to(dtype)), bits(weight))
    for rows in ROWS:
        x, residual = noise(rows, depth, dtype=dtype, seed=1), noise(rows, columns, dtype=dtype, seed=3)
        exact, slack = x.double() @ weight.double().T, depth * 2**-24 * magnitudes(x, weight)
        check(packed.linear(x), exact, slack)
        check(packed.linear(x, bias), exact + bias.double(), slack + 2**-24 * (exact.abs() + 4))
        rounded = packed.linear(x, bias) + residual
        assert torch.equal(bits(packed.linear(x, bias, residual)), bits(rounded))
        assert torch.equal(bits(packed.linear(x, bias, residual, out=residual)), bits(rounded))


def test_dot_products_of_pairs() -> None:
    """The fast path of bf16, tested on every processor."""
    library = open_library()
    assert library is not None
    set_dot = declare(library, "qt_weight_set_dot", ctypes.c_void_p, ctypes.c_int)
    weight = noise(130, 385, dtype=torch.bfloat16)
    packed = pack(weight)
    x = noise(193, 385, dtype=torch.bfloat16, seed=1)
    exact, slack = x.double() @ weight.double().T, 385 * 2**-23 * magnitudes(x, weight)
    for dot in (0, 1):
        set_dot(packed.handle, dot)
        whole = packed.linear(x)
        check(whole, exact, slack)
        for begin, end in ((0, 1), (5, 12), (190, 193)):
            assert torch.equal(bits(packed.linear(x[begin:end])), bits(whole[begin:end]))


@pytest.mark.parametrize("activation", [GatedActivation.SILU_AND_MUL, GatedActivation.GELU_TANH_AND_MUL])
@floats
@pytest.mark.parametrize(("columns", "depth"), [(2, 3), (64, 128), (66, 127), (200, 65)])
def test_paired(dtype: torch.dtype, activation: GatedActivation, columns: int, depth: int) -> None:
    """Against the reference applied to the unpaired product of the same kernel. The last bits of the activation's exponential
    may differ, and round both halves the other way. For a gate far below zero torch computes 1 + tanh, which is off by 2^-24,
    times a gate and an up of up to 6 each."""
    weight, bias = noise(columns, depth, dtype=dtype) * 0.3, noise(columns, dtype=dtype, seed=2)
    packed, plain = PackedWeight(kernels(), FLOATS[dtype], columns, depth, paired=True), pack(weight)
    half = columns // 2
    packed.fill(weight[half:], half)
    packed.fill(weight[:half])
    assert torch.equal(packed.read(), weight.float())
    identity = torch.eye(columns, dtype=dtype)
    unit = 2 * HALF_UNIT[dtype]
    for rows in (1, 7, 40):
        x = noise(rows, depth, dtype=dtype, seed=1)
        expected = linear(plain.linear(x, bias), identity, None, activation)
        out = packed.linear(x, bias, activation=activation)
        torch.testing.assert_close(out, expected, rtol=2 * unit + 2**-20, atol=36 * 2**-24)


@integers
@shapes
def test_integers(weight_format: WeightFormat, group: int, columns: int, depth: int) -> None:
    weight, bias = noise(columns, depth), noise(columns, seed=2)
    packed = pack(weight, weight_format, group)
    numbers = packed.read()
    for rows in ROWS:
        x, residual = noise(rows, depth, seed=1), noise(rows, columns, seed=3)
        exact = x.double() @ numbers.double().T + bias.double() + residual.double()
        sizes = numbers.double().abs().sum(1)
        largest = x.double().abs().amax(1, keepdim=True)
        slack = depth * 2**-23 * magnitudes(x, numbers) + 1e-5
        check(packed.linear(x, bias, residual), exact, slack + 2**-16 * largest * sizes, 2)
        for inputs in (Inputs.EIGHT_BITS, Inputs.EIGHT_BITS_IN_GROUPS):
            eight = packed.linear(x, bias, residual, inputs=inputs)
            check(eight, exact, slack + 2**-8 * 1.01 * largest * sizes, 2)


@pytest.mark.parametrize(("weight_format", "group"), [each for each in INTEGERS if each[1]])
def test_inputs_of_8_bits_have_a_scale_for_each_group(weight_format: WeightFormat, group: int) -> None:
    """A group of small inputs keeps its precision next to one of large inputs, unlike with one scale for the token."""
    depth = 4 * group + group // 2
    packed = pack(noise(70, depth), weight_format, group)
    numbers = packed.read().double()
    x = noise(7, depth, seed=1)
    small = torch.arange(depth) // group % 2 == 1
    x[:, small] *= 1e-3
    groups = [slice(begin, begin + group) for begin in range(0, depth, group)]
    largest = [
        x[:, each].double().abs().amax(1, keepdim=True) * numbers[:, each].abs().sum(1) for each in groups
    ]
    bound = 2**-8 * 1.01 * sum(largest[1::2])
    only_small = x * small
    for inputs, small_ones in ((Inputs.EIGHT_BITS_IN_GROUPS, True), (Inputs.EIGHT_BITS, False)):
        product = packed.linear(x, inputs=inputs).double() - packed.linear(x * ~small, inputs=inputs).double()
        error = (product - only_small.double() @ numbers.T).abs()
        slack = 2**-19 * magnitudes(x, numbers)  # a few roundings for each group, twice
        assert bool((error <= bound + slack).all()) is small_ones, inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_with_narrow_activations(dtype: torch.dtype) -> None:
    packed = pack(noise(70, 200), WeightFormat.INT8)
    x, bias, residual = noise(5, 200, dtype=dtype), noise(70, dtype=dtype), noise(5, 70, dtype=dtype, seed=3)
    product = packed.linear(x.float(), bias.float()).to(dtype)
    assert torch.equal(bits(packed.linear(x, bias, residual)), bits(product + residual))


@pytest.mark.parametrize(
    ("weight_format", "group", "most"),
    [
        (WeightFormat.INT8, 0, 0.01),
        (WeightFormat.INT8, 128, 0.008),
        (WeightFormat.INT4, 128, 0.105),
        (WeightFormat.INT4, 32, 0.09),
        (WeightFormat.INT4_ZEROS, 128, 0.1),
    ],
)
def test_quantization_error_of_normal_weights(weight_format: WeightFormat, group: int, most: float) -> None:
    """The root mean square error relative to the weights'. Uniform steps with a largest magnitude of 3 to 3.5 deviations give
    step / sqrt(12): 0.0079 for 127 steps, 0.13 for 7.5. The least-squares 4-bit scales must be better than that."""
    weight = noise(256, 1024)
    packed = pack(weight, weight_format, group)
    assert float((packed.read() - weight).pow(2).mean().sqrt()) < most


def test_quantizing_keeps_zero_and_extreme_columns() -> None:
    weight = noise(64, 256)
    weight[3] = 0
    weight[4] *= 1e-6
    weight[5] *= 1e4
    weight[6, :128] = 0
    for weight_format, group in INTEGERS:
        numbers = pack(weight, weight_format, group).read()
        assert not numbers[3].any()
        if group in (32, 64, 128):
            assert not numbers[6, :128].any()
        error = (numbers - weight).pow(2).mean(1).sqrt() / weight.pow(2).mean(1).sqrt()
        assert bool((error[4:6] < 0.2).all()), (weight_format, group, error[4:6])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@integers
def test_a_row_that_is_not_finite_does_not_affect_others(
    weight_format: WeightFormat, group: int, bad: float
) -> None:
    packed = pack(noise(70, 200), weight_format, group)
    x = noise(5, 200, seed=1)
    for inputs in Inputs:
        whole = packed.linear(x, inputs=inputs)
        spoilt = x.clone()
        spoilt[2, 150] = bad
        out = packed.linear(spoilt, inputs=inputs)
        assert bool(out[2].isnan().all())
        assert torch.equal(bits(out[[0, 1, 3, 4]]), bits(whole[[0, 1, 3, 4]]))


def test_zero_rows() -> None:
    for packed in (pack(noise(70, 200)), pack(noise(70, 200), WeightFormat.INT4, 32)):
        assert not packed.linear(torch.zeros(3, 200)).any()
        assert packed.linear(torch.zeros(0, 200)).shape == (0, 70)


ALL_FORMATS = [
    (WeightFormat.BF16, 0, torch.bfloat16, Inputs.SIXTEEN_BITS),
    (WeightFormat.FP16, 0, torch.float16, Inputs.SIXTEEN_BITS),
    (WeightFormat.FP32, 0, torch.float32, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT8, 0, torch.bfloat16, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT8, 0, torch.bfloat16, Inputs.EIGHT_BITS),
    (WeightFormat.INT8, 64, torch.float32, Inputs.EIGHT_BITS_IN_GROUPS),
    (WeightFormat.INT4, 128, torch.bfloat16, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT4, 32, torch.bfloat16, Inputs.EIGHT_BITS),
    (WeightFormat.INT4, 32, torch.bfloat16, Inputs.EIGHT_BITS_IN_GROUPS),
    (WeightFormat.INT4_ZEROS, 64, torch.float32, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT4_ZEROS, 128, torch.float32, Inputs.EIGHT_BITS_IN_GROUPS),
]


@pytest.mark.parametrize(("weight_format", "group", "dtype", "inputs"), ALL_FORMATS)
def test_float32_results_are_the_unrounded_sums(
    weight_format: WeightFormat, group: int, dtype: torch.dtype, inputs: Inputs, threads: int
) -> None:
    """Rounding them gives the usual output: full and partial tiles, k in slices, one row and full panels."""
    for columns, depth in ((130, 200), (100, 2300)):
        packed = pack(noise(columns, depth, dtype=dtype), weight_format, group)
        x, bias = noise(197, depth, dtype=dtype, seed=1), noise(columns, dtype=dtype, seed=2)
        for rows in (1, 7, 197):
            for its in (bias, None):
                sums = packed.linear(x[:rows], its, inputs=inputs, result_dtype=torch.float32)
                rounded = packed.linear(x[:rows], its, inputs=inputs)
                assert sums.dtype is torch.float32 and torch.equal(bits(sums.to(dtype)), bits(rounded))
                assert dtype is torch.float32 or not torch.equal(sums, rounded.float())


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize(("weight_format", "group", "dtype", "inputs"), ALL_FORMATS)
def test_a_row_has_the_same_bits_in_every_batch(
    weight_format: WeightFormat, group: int, dtype: torch.dtype, inputs: Inputs
) -> None:
    """A row alone, in 2 to 64 rows, across the borders of panels, and on 1, 2 and 40 threads, which split tiles."""
    columns, depth, rows = 130, 1100, 210
    packed = pack(noise(columns, depth, dtype=dtype), weight_format, group)
    x, bias = noise(rows, depth, dtype=dtype, seed=1), noise(columns, dtype=dtype, seed=2)
    whole = bits(packed.linear(x, bias, inputs=inputs))
    for count in (1, 2, 40):
        set_threads(count)
        assert torch.equal(bits(packed.linear(x, bias, inputs=inputs)), whole)
        for begin, end in (
            (0, 1),
            (5, 7),
            (3, 8),
            (100, 112),
            (100, 113),
            (7, 71),
            (189, 210),
            (209, 210),
            (0, 194),
            (0, 196),
        ):
            part = packed.linear(x[begin:end], bias, inputs=inputs)
            assert torch.equal(bits(part), whole[begin:end])


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize(("weight_format", "group", "dtype", "inputs"), ALL_FORMATS)
def test_few_rows_have_the_bits_of_single_rows(
    weight_format: WeightFormat, group: int, dtype: torch.dtype, inputs: Inputs
) -> None:
    """Every number of rows up to 16, as drafts are verified: whole and partial groups of k, and items of 64 to 16 columns."""
    for columns, depth in ((130, 1088), (70, 1100)):
        packed = pack(noise(columns, depth, dtype=dtype), weight_format, group)
        x = noise(16, depth, dtype=dtype, seed=1)
        single = torch.cat([bits(packed.linear(row[None], inputs=inputs)) for row in x])
        for count in (1, 3, 12):
            set_threads(count)
            for begin in range(16):
                assert torch.equal(bits(packed.linear(x[begin:], inputs=inputs)), single[begin:]), (
                    count,
                    begin,
                )


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize(("weight_format", "group", "dtype", "inputs"), ALL_FORMATS)
@pytest.mark.parametrize("paired", [False, True])
def test_sliced_depth_has_the_same_bits_in_every_batch(
    weight_format: WeightFormat, group: int, dtype: torch.dtype, inputs: Inputs, paired: bool
) -> None:
    """Narrow and deep, so that k has slices: in one task, or in separate ones for more threads; full and partial tiles."""
    columns, depth = 140, 2300
    activation = GatedActivation.SILU_AND_MUL if paired else GatedActivation.NONE
    packed = pack(noise(columns, depth, dtype=dtype), weight_format, group, paired)
    x, bias = noise(200, depth, dtype=dtype, seed=1), noise(columns, dtype=dtype, seed=2)
    residual = None if paired else noise(200, columns, dtype=dtype, seed=3)

    def compute(rows: int) -> torch.Tensor:
        part = None if residual is None else residual[:rows]
        return bits(packed.linear(x[:rows], bias, part, activation=activation, inputs=inputs))

    whole = compute(200)
    for count in (1, 2, 3, 8, 32, 100):  # far more than cores; more than 64
        set_threads(count)
        for rows in (1, 2, 3, 5, 12, 13, 33, 64, 65, 130, 200):
            assert torch.equal(compute(rows), whole[:rows]), (count, rows)


@pytest.mark.parametrize("threads", [1, 32], indirect=True)
@floats
def test_slices_are_summed_in_order(dtype: torch.dtype, threads: int) -> None:
    """((first + second) + third) ...: each of 256 k from zero, like a weight of that depth, in fp32."""
    if dtype is torch.bfloat16 and isa() in MATRIX_UNITS:
        pytest.skip("the matrix unit sums in another order within a slice: see test_amx.py")
    library = open_library()
    assert library is not None
    columns, depth = 100, 1100
    weight, x = noise(columns, depth, dtype=dtype), noise(3, depth, dtype=dtype, seed=1)
    packed = pack(weight)
    declare(library, "qt_weight_set_dot", ctypes.c_void_p, ctypes.c_int)(packed.handle, 0)
    total = torch.zeros(3, columns)
    for begin in range(0, depth, 256):
        part = slice(begin, begin + 256)
        total = total + pack(weight[:, part].float()).linear(x[:, part].float())
    assert torch.equal(bits(packed.linear(x)), bits(total.to(dtype)))


FORMATS_WITH_LEAVES = [
    (None, 0, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT8, 0, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT8, 0, Inputs.EIGHT_BITS),
    (WeightFormat.INT4, 128, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT4, 128, Inputs.EIGHT_BITS_IN_GROUPS),
]


@pytest.mark.parametrize("threads", [1, 32], indirect=True)
@pytest.mark.parametrize("depth", [8 * 28, 8 * 700])
@pytest.mark.parametrize(("weight_format", "group", "inputs"), FORMATS_WITH_LEAVES)
def test_leaves_are_added_as_a_tree(
    weight_format: WeightFormat | None, group: int, inputs: Inputs, depth: int, threads: int
) -> None:
    """Each leaf has the bits of a separate weight, with the same slices: half of the leaves gives half of the sum."""
    columns, chosen = 100, weight_format or WeightFormat.FP32
    weight, x = noise(columns, depth), noise(130, depth, seed=1)

    def of(begin: int, end: int, leaves: int) -> tuple[PackedWeight, torch.Tensor]:
        part = slice(begin * depth // 8, end * depth // 8)
        packed = PackedWeight(
            kernels(),
            chosen,
            columns,
            (end - begin) * depth // 8,
            group=group,
            leaves=leaves,
            cut_columns=8 * columns,
        )
        packed.fill(weight[:, part])
        return packed, x[:, part]

    def sums(begin: int, end: int, rows: int) -> torch.Tensor:
        if end - begin == 1:
            packed, its = of(begin, end, 1)
            return packed.linear(its[:rows], inputs=inputs)
        middle = (begin + end) // 2
        return sums(begin, middle, rows) + sums(middle, end, rows)

    for begin, end in ((0, 8), (2, 4), (4, 8)):
        packed, its = of(begin, end, end - begin)
        apart = torch.cat([of(leaf, leaf + 1, 1)[0].read() for leaf in range(begin, end)], 1)
        assert torch.equal(bits(packed.read()), bits(apart))
        for rows in (1, 5, 130):
            out = packed.linear(its[:rows], inputs=inputs)
            assert torch.equal(bits(out), bits(sums(begin, end, rows))), (begin, end, rows)


@integers
def test_integers_have_the_bits_of_exact_sums(weight_format: WeightFormat, group: int) -> None:
    """With one group of k the result is a product of exact integers, scaled: the same for every instruction set."""
    if weight_format.has_zeros:
        return  # the zero point's term is added in floating point
    depth = 32
    packed = pack(noise(70, depth), weight_format, group)
    numbers = packed.read()
    x = noise(3, depth, seed=1)
    x[:, 0] = 127.0  # the scale of 8 bits is 1
    x = x.round()
    out = packed.linear(x, inputs=Inputs.EIGHT_BITS)
    exact = x.double() @ numbers.double().T
    # Two roundings for the scales' products, one for each of the result's two factors.
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-21, atol=0)


def test_rows_of_x_and_y_may_be_strided() -> None:
    for dtype, weight_format in ((torch.bfloat16, WeightFormat.BF16), (torch.float32, WeightFormat.INT8)):
        packed = pack(noise(40, 24, dtype=dtype), weight_format)
        x, out = noise(40, 48, dtype=dtype, seed=1), torch.full((40, 50), 7.0, dtype=dtype)
        packed.linear(x[:, 8:32], out=out[:, 3:43])
        assert torch.equal(out[:, 3:43], packed.linear(x[:, 8:32].contiguous()))
        assert bool((out[:, :3] == 7).all()) and bool((out[:, 43:] == 7).all())


@pytest.mark.parametrize(
    ("weight_format", "group"), [(WeightFormat.FP16, 0), (WeightFormat.BF16, 0), *INTEGERS]
)
@pytest.mark.parametrize("paired", [False, True])
def test_a_weight_can_be_filled_in_parts(weight_format: WeightFormat, group: int, paired: bool) -> None:
    """The packed bytes do not depend on the number of calls, their order, or the stride of rows."""
    weight = noise(150, 130, dtype=torch.bfloat16)
    whole = pack(weight, weight_format, group, paired)
    parts = PackedWeight(kernels(), weight_format, 150, 130, group=group, paired=paired)
    for begin, end in ((70, 77), (0, 5), (77, 150), (5, 70)):
        parts.fill(weight[begin:end].T.contiguous().T if begin == 0 else weight[begin:end], begin)
    assert torch.equal(parts.memory, whole.memory)
    assert torch.equal(parts.read(20, 90), whole.read(20, 90))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@floats
def test_a_weight_can_be_filled_from_another_dtype(dtype: torch.dtype, source: torch.dtype) -> None:
    weight = noise(70, 65, dtype=source)
    packed = PackedWeight(kernels(), FLOATS[dtype], 70, 65)
    packed.fill(weight)
    assert torch.equal(packed.read(), weight.to(dtype).float())


def test_packed_bytes_are_loaded_unchanged() -> None:
    packed = pack(noise(70, 65), WeightFormat.INT4, 32)
    again = PackedWeight(kernels(), WeightFormat.INT4, 70, 65, group=32, memory=packed.memory)
    x = noise(3, 65, seed=1)
    assert torch.equal(again.linear(x), packed.linear(x))
    with pytest.raises(PackedWeightError, match=r"uint8\[\d+\], contiguous"):
        PackedWeight(kernels(), WeightFormat.INT4, 70, 65, group=32, memory=packed.memory[64:])
    with pytest.raises(PackedWeightError, match="multiple of 64"):
        moved = torch.empty(packed.memory.shape[0] + 128, dtype=torch.uint8)
        at = (64 - moved.data_ptr()) % 64 + 8
        memory = moved[at : at + packed.memory.shape[0]]
        PackedWeight(kernels(), WeightFormat.INT4, 70, 65, group=32, memory=memory)


def test_invalid_arguments_are_rejected() -> None:
    packed = pack(noise(40, 24, dtype=torch.bfloat16))
    with pytest.raises(PackedWeightError, match=r"bfloat16\[9, 48\].*\[rows, 24\]"):
        packed.linear(noise(9, 48, dtype=torch.bfloat16))
    with pytest.raises(PackedWeightError, match=r"expected torch\.bfloat16"):
        packed.linear(noise(9, 24))
    with pytest.raises(PackedWeightError, match="paired"):
        packed.linear(noise(9, 24, dtype=torch.bfloat16), activation=GatedActivation.SILU_AND_MUL)
    with pytest.raises(PackedWeightError, match="8-bit activations"):
        packed.linear(noise(9, 24, dtype=torch.bfloat16), inputs=Inputs.EIGHT_BITS)
    with pytest.raises(PackedWeightError, match="columns 30 to 41 are out of range; the weight has 40"):
        packed.fill(noise(11, 24), 30)
    with pytest.raises(PackedWeightError, match="32, 64 or 128 for int4"):
        PackedWeight(kernels(), WeightFormat.INT4, 64, 64)


def programs() -> ProgramLibrary:
    library = program_library()
    assert library is not None
    return library


@pytest.mark.parametrize(("weight_format", "group", "dtype", "inputs"), ALL_FORMATS)
@pytest.mark.parametrize("extent", [0, 1])
def test_a_program_computes_the_same_bits(
    weight_format: WeightFormat, group: int, dtype: torch.dtype, inputs: Inputs, extent: int
) -> None:
    library = programs()
    packed = pack(noise(70, 200, dtype=dtype), weight_format, group)
    x, bias = noise(20, 200, dtype=dtype, seed=1), noise(70, dtype=dtype, seed=2)
    y = torch.zeros(20, 70, dtype=dtype)
    code = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]
    program = library.new()
    library.linear(
        *(program, packed.handle, x.data_ptr(), 200, 20, code, bias.data_ptr(), None),
        *(y.data_ptr(), 70, 0, int(inputs), code, extent),
    )
    for rows in (20, 1, 15):
        y.zero_()
        step = CStep(rows if extent == 0 else 0, 0, rows if extent == 1 else 0)
        library.run(program, ctypes.byref(step), 0, library.size(program))
        assert torch.equal(bits(y[:rows]), bits(packed.linear(x[:rows], bias, inputs=inputs)))
        assert not y[rows:].any()
    library.delete(program)


@pytest.mark.parametrize(("weight_format", "group", "dtype", "inputs"), ALL_FORMATS)
def test_embeddings_from_a_packed_weight(
    weight_format: WeightFormat, group: int, dtype: torch.dtype, inputs: Inputs
) -> None:
    del inputs
    library = programs()
    packed = pack(noise(130, 67, dtype=dtype), weight_format, group)
    ids = np.array([0, 129, 64, 63, 64], dtype=np.int32)
    y = torch.zeros(5, 67, dtype=dtype)
    program = library.new()
    code = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]
    library.embedding_packed(program, packed.handle, y.data_ptr(), 67, code)
    library.run(program, ctypes.byref(CStep(5, 1, 0, ids.ctypes.data)), 0, library.size(program))
    assert torch.equal(y, packed.read().to(dtype)[ids.astype(np.int64)])
    library.delete(program)


def test_the_instruction_set_is_covered_by_repeated_runs() -> None:
    library = open_library()
    assert library is not None
    assert isa() in instruction_sets(library)
