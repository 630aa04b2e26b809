"""Packed weights filled with a checkpoint's integers: reading returns ``(code - zero) * scale`` in fp32, to the bit."""

from __future__ import annotations

import pytest
import torch

from quintet.executor.backends.cpu.ops.host_library import open_library
from quintet.executor.backends.cpu.ops.host_linear import Inputs, LinearLibrary, WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight, PackedWeightError

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

DRAWS = torch.Generator().manual_seed(14)
FORMATS = [
    (WeightFormat.INT8, 0),
    (WeightFormat.INT8, 32),
    (WeightFormat.INT8_ZEROS, 128),
    (WeightFormat.INT4, 32),
    (WeightFormat.INT4, 128),
    (WeightFormat.INT4_ZEROS, 64),
    (WeightFormat.INT4_SINGLE, 32),
    (WeightFormat.INT8_SINGLE_ZEROS, 16),
]
SHAPES = [(1, 1), (63, 7), (70, 130), (130, 512)]


def kernels() -> LinearLibrary:
    library = linear_library()
    assert library is not None
    return library


def draw(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=DRAWS, dtype=torch.uint8)


def scales(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return scales of both signs, over all powers of two that these dtypes hold."""
    powers = torch.randint(-12, 2, shape, generator=DRAWS)
    signs = torch.randint(0, 2, shape, generator=DRAWS) * 2 - 1
    return (signs * (1 + torch.rand(shape, generator=DRAWS)) * 2.0**powers).bfloat16().to(dtype)


def numbers(codes: torch.Tensor, factors: torch.Tensor, zeros: torch.Tensor, group: int) -> torch.Tensor:
    """Dequantize by the definition."""
    place = torch.arange(codes.shape[1]) // group
    return (codes.float() - zeros.float()[:, place]) * factors.float()[:, place]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("times", [1, 2, 1000], ids=["its groups", "twice its groups", "one scale"])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize(("form", "group"), FORMATS)
def test_codes(
    form: WeightFormat, group: int, columns: int, depth: int, times: int, dtype: torch.dtype
) -> None:
    levels = form.code_levels
    of_scales = min(depth, group * times or depth)
    count = -(-depth // of_scales)
    codes, factors = draw(levels, columns, depth), scales(dtype, columns, count)
    zeros = torch.full((columns, count), levels // 2, dtype=torch.uint8)
    weight = PackedWeight(kernels(), form, columns, depth, group=group)
    weight.fill_codes(codes, factors, group=of_scales if count > 1 else 0)
    assert torch.equal(weight.read(), numbers(codes, factors, zeros, of_scales))
    signed = (codes.int() - levels // 2).to(torch.int8)
    other = PackedWeight(kernels(), form, columns, depth, group=group)
    other.fill_codes(signed, factors, group=of_scales if count > 1 else 0)
    assert torch.equal(other.read(), weight.read())
    if form.has_zeros:
        zeros = draw(
            levels + 1 if levels == 16 else levels, columns, count
        )  # GPTQ's stored zero point plus one
        zeros = zeros + torch.rand(zeros.shape, generator=DRAWS) if form.has_real_zeros else zeros
        weight.fill_codes(codes, factors, zeros, group=of_scales if count > 1 else 0)
        assert torch.equal(weight.read(), numbers(codes, factors, zeros, of_scales))


WITH_ZEROS = [form for form in WeightFormat if form.has_zeros]


@pytest.mark.parametrize("form", [*WITH_ZEROS, WeightFormat.INT4_SINGLE, WeightFormat.INT8_SINGLE])
def test_scales_and_zero_points_are_multiplied(form: WeightFormat) -> None:
    """x in 16 bits is off by 2^-16 of its group's largest magnitude; fp32 sums are off by less than that."""
    levels, columns, depth, group = form.code_levels, 70, 1100, 32
    codes, zeros = draw(levels, columns, depth), draw(levels, columns, -(-depth // group))
    factors = torch.rand(zeros.shape, generator=DRAWS)
    if form.has_real_zeros:
        zeros = zeros + torch.rand(zeros.shape, generator=DRAWS)
    if not form.has_singles:
        factors = factors.half()
    if not form.has_zeros:
        zeros = torch.full_like(zeros, levels // 2)
    weight = PackedWeight(kernels(), form, columns, depth, group=group)
    weight.fill_codes(codes, factors, zeros if form.has_zeros else None)
    exact = numbers(codes, factors, zeros, group)
    assert torch.equal(weight.read(), exact)
    x, exact = torch.randn(70, depth, generator=DRAWS), exact.double()
    whole = weight.linear(x)
    error = (whole.double() - x.double() @ exact.T).abs()
    assert bool((error <= 2**-16 * 1.1 * x.abs().amax() * exact.abs().sum(1)).all())
    for begin, end in ((0, 1), (5, 8), (3, 50)):
        assert torch.equal(weight.linear(x[begin:end]), whole[begin:end])


def test_parts_of_paired_and_stacked_weights() -> None:
    """Parts in any order; gates and ups; several weights in one memory; strided rows."""
    columns, depth, group = 140, 320, 64
    codes, zeros = draw(16, 2, columns, depth), draw(16, 2, columns, 5)
    factors = scales(torch.float16, 2, columns, 5)
    size = kernels().weight_bytes(int(WeightFormat.INT4_ZEROS), columns, depth, group, 1)
    memory = torch.zeros(2 * size + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][: 2 * size]
    wide = torch.zeros(2, columns, depth + 3, dtype=torch.uint8)
    wide[:, :, :depth] = codes
    for i, part in enumerate(memory.chunk(2)):
        weight = PackedWeight(
            kernels(), WeightFormat.INT4_ZEROS, columns, depth, group=group, paired=True, memory=part
        )
        whole = numbers(codes[i], factors[i], zeros[i], group)
        for begin, end in ((100, 140), (0, 30), (30, 100)):
            weight.fill_codes(
                wide[i, begin:end, :depth], factors[i, begin:end], zeros[i, begin:end], first_column=begin
            )
        assert torch.equal(weight.read(), whole)
        plain = PackedWeight(kernels(), WeightFormat.INT4_ZEROS, columns, depth, group=group)
        plain.fill_codes(codes[i], factors[i], zeros[i])
        x = torch.randn(3, depth, generator=DRAWS)
        gates, ups = plain.linear(x).split(columns // 2, 1)
        out = weight.linear(x, activation=GatedActivation.SILU_AND_MUL)
        torch.testing.assert_close(out, torch.nn.functional.silu(gates) * ups, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("form", [WeightFormat.MXFP4, WeightFormat.NVFP4])
def test_fp4(form: WeightFormat) -> None:
    """Every finite scale, factors of columns, and products of both."""
    columns, depth, group = 260, 160, form.bytes_group
    codes = draw(16, columns, depth)
    if form is WeightFormat.MXFP4:
        scales = torch.arange(columns)[:, None].clamp(max=254).to(torch.uint8).repeat(1, depth // group)
        values = (2.0 ** (scales.double() - 127)).float()
    else:
        scales = torch.arange(columns * depth // group).to(torch.uint8).reshape(columns, -1)
        scales[scales % 128 == 127] = 1
        values = scales.view(torch.float8_e4m3fn).float()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    numbers = table[codes.int()].unflatten(1, (-1, group)) * values[:, :, None]
    weight = PackedWeight(kernels(), form, columns, depth)
    weight.fill_fp4(codes, scales)
    assert torch.equal(weight.read(), numbers.flatten(1))
    factors = torch.rand(columns, generator=DRAWS) + 0.5
    weight.fill_fp4(codes, scales, factors)
    exact = table[codes.int()].unflatten(1, (-1, group)) * (values * factors[:, None])[:, :, None]
    some = slice(100, 140)  # of MXFP4 those with finite products that are not denormal
    assert torch.equal(weight.read()[some], exact.flatten(1)[some])
    x = torch.randn(20, depth, generator=DRAWS)
    part = exact.flatten(1)[some].double()
    error = (weight.linear(x)[:, some].double() - x.double() @ part.T).abs()
    assert bool((error <= 2**-16 * 1.1 * x.abs().amax() * part.abs().sum(1)).all())
    with pytest.raises(PackedWeightError, match="0 to 15"):
        weight.fill_fp4(codes + 1, scales)
    scales[7, 1] = 255
    with pytest.raises(PackedWeightError, match="are NaN"):
        weight.fill_fp4(codes, scales)
    with pytest.raises(PackedWeightError, match="scales are"):
        weight.fill_fp4(codes, scales[:, 1:])
    with pytest.raises(PackedWeightError, match="INT4"):
        PackedWeight(kernels(), WeightFormat.INT4, columns, depth, group=32).fill_fp4(codes, scales)


def bitsandbytes_table(form: WeightFormat) -> torch.Tensor:
    """nf4 by its published numbers; fp4 by the meaning of its bits: 0.0625, 8, 12, 4, 6, 2, 3 of twelve, and a sign."""
    if form is WeightFormat.NF4:
        values = """
            -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
            -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
            0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
            0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
        """
        return torch.tensor([float(value) for value in values.split()])
    upper = torch.tensor([0.0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
    return torch.cat([upper, -upper])


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(64, 64), (70, 130), (140, 2300)])
@pytest.mark.parametrize(
    ("form", "group"), [(WeightFormat.FP8, 128), (WeightFormat.NF4, 64), (WeightFormat.FP4, 64)]
)
def test_coded_floats(form: WeightFormat, group: int, columns: int, depth: int, paired: bool) -> None:
    """Numbers, products (fp32 sums are off by at most their count of roundings), and the same bits for every number of rows."""
    codes = draw(form.code_levels, columns, depth)
    if form is WeightFormat.FP8:
        codes[codes % 128 == 127] = 3
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        values = bitsandbytes_table(form)[codes.int()]
    factors = torch.rand(columns, -(-depth // group), generator=DRAWS) * 0.01
    numbers = values * factors[:, torch.arange(depth) // group]
    weight = PackedWeight(kernels(), form, columns, depth, group=group, paired=paired)
    for begin, end in ((columns // 2, columns), (0, columns // 2)):
        weight.fill_codes(codes[begin:end], factors[begin:end], first_column=begin)
    assert torch.equal(weight.read(), numbers)
    x = torch.randn(70, depth, generator=DRAWS)
    if paired:
        whole = weight.linear(x, activation=GatedActivation.SILU_AND_MUL)
        for begin, end in ((0, 1), (5, 8), (3, 50)):
            part = weight.linear(x[begin:end], activation=GatedActivation.SILU_AND_MUL)
            assert torch.equal(part, whole[begin:end])
        return
    whole = weight.linear(x)
    error = (whole.double() - x.double() @ numbers.double().T).abs()
    assert bool((error <= depth * 2**-24 * (x.double().abs() @ numbers.double().abs().T) + 1e-30).all())
    for begin, end in ((0, 1), (5, 8), (3, 50), (60, 70)):
        assert torch.equal(weight.linear(x[begin:end]), whole[begin:end])
    narrow = weight.linear(x[:3].bfloat16())
    assert torch.equal(narrow, weight.linear(x[:3].bfloat16().float()).bfloat16())


def test_invalid_arguments_of_coded_floats_are_rejected() -> None:
    weight = PackedWeight(kernels(), WeightFormat.FP8, 64, 128, group=128)
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    with pytest.raises(PackedWeightError, match="NaN"):
        weight.fill_codes(codes | 255, torch.ones(64, 1))
    with pytest.raises(PackedWeightError, match="needs uint8"):
        weight.fill_codes(codes.to(torch.int8), torch.ones(64, 1))
    with pytest.raises(PackedWeightError, match="8-bit activations"):
        weight.linear(torch.zeros(1, 128), inputs=Inputs.EIGHT_BITS)
    with pytest.raises(PackedWeightError, match="FP8"):
        weight.fill(torch.zeros(64, 128))


def test_codes_that_are_not_exact_are_rejected() -> None:
    weight = PackedWeight(kernels(), WeightFormat.INT4, 64, 128, group=32)
    codes, factors = draw(16, 64, 128), torch.ones(64, 4)
    wrong = codes.clone()
    wrong[63, 127] = 16
    with pytest.raises(PackedWeightError, match="4-bit"):
        weight.fill_codes(wrong, factors)
    with pytest.raises(PackedWeightError, match="4-bit"):
        weight.fill_codes((codes.int() - 9).to(torch.int8), factors)
    for scale in (1.0001, float("inf"), float("nan"), 2.0**-40):
        spoilt = factors.clone()
        spoilt[5, 2] = scale
        with pytest.raises(PackedWeightError, match="scales are"):
            weight.fill_codes(codes, spoilt)
    real = PackedWeight(kernels(), WeightFormat.INT4_SINGLE_ZEROS, 64, 128, group=32)
    with pytest.raises(PackedWeightError, match="not finite"):
        real.fill_codes(codes, factors, torch.full((64, 4), float("inf")))
    with pytest.raises(PackedWeightError, match=r"expected torch\.float32"):
        real.fill_codes(codes, factors, draw(16, 64, 4))
    with pytest.raises(PackedWeightError, match="cannot quantize into INT4_SINGLE_ZEROS"):
        real.fill(torch.zeros(64, 128))
    for arguments, message in (
        ((codes[:, :127], factors), "codes are"),
        ((codes.int(), factors), "codes are"),
        ((codes, factors[:, :3]), "scales are"),
        ((codes, factors.double()), "scales are"),
        ((codes, factors, draw(16, 64, 4)), "zero points"),
    ):
        with pytest.raises(PackedWeightError, match=message):
            weight.fill_codes(*arguments)
    with pytest.raises(PackedWeightError, match="the weight's group 32"):
        weight.fill_codes(codes, factors, group=48)
    with pytest.raises(PackedWeightError, match="columns 1 to 65"):
        weight.fill_codes(codes, factors, first_column=1)
    with pytest.raises(PackedWeightError, match="BF16"):
        PackedWeight(kernels(), WeightFormat.BF16, 64, 128).fill_codes(codes, factors)
