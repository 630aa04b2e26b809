"""Products of fp8 with fp8: rows quantize as in torch; bits depend on the row and the weight only.

Bounds are those of `tests.cuda.kernels.test_linear`, for numbers in e4m3, which the reference has too.
"""

from __future__ import annotations

import pytest
import torch
from tests.cuda.kernels.test_linear import HALF_UNIT, GridRecorder, noise, same

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.linear import OperandError, SplitMemory
from quintet.executor.backends.cuda.ops.linear_fp8 import (
    FP8,
    TILES,
    fp8_matmul,
    fp8_matmul_reference,
    fp8_quantize,
    fp8_quantize_reference,
)

COLUMNS, DEPTH = 72, 2 * 512 + 48
"""A full tile and a partial tile of columns; chunks with a partial step at the end."""
every_format = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def weight_of(device: Device, columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = noise(device, torch.float32, columns, depth, seed=1).to(FP8)
    return weight, noise(device, torch.float32, columns, seed=2).abs() + 0.1


@every_format
def test_row_quantization_equals_torch(dtype: torch.dtype, device: Device) -> None:
    """Also zeros, numbers that differ by many powers of two, and strided rows."""
    x = noise(device, dtype, 5, 144) * torch.tensor([[1], [0], [1e-3], [200], [1]], dtype=dtype).to(
        device.torch_device
    )
    x[4, ::7] *= 2.0**-9
    codes, scales = fp8_quantize(device, x[:, :136])
    expected, expected_scales = fp8_quantize_reference(x[:, :136])
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8) & 0x7F, expected.view(torch.uint8) & 0x7F)
    assert torch.equal(codes.float(), expected.float())


def test_instruction_equals_two_of_fp16(device: Device) -> None:
    """Sums of 32 products of small whole numbers: exact in any order."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (rows, 32), generator=draw).float().to(FP8) for rows in (16, 8))
    d, by_fp16 = (torch.zeros(16, 8, device=device.torch_device) for _ in range(2))
    operands = (a.to(device.torch_device), b.to(device.torch_device), d, by_fp16)
    device.launch(Kernel("selftest", "selftest_multiply_fp8", "pppp"), (1, 1, 1), (32, 1, 1), operands)
    assert torch.equal(d.cpu(), a.float() @ b.float().T) and torch.equal(by_fp16, d)


@every_format
def test_products(dtype: torch.dtype, device: Device) -> None:
    weight, scales = weight_of(device, COLUMNS, DEPTH)
    x, bias = noise(device, dtype, 17, DEPTH), noise(device, dtype, COLUMNS, seed=3)
    y = fp8_matmul(device, x, weight, scales, bias, memory=SplitMemory(device))
    sums = fp8_matmul(device, x, weight, scales, bias, torch.empty(17, COLUMNS, device=device.torch_device))
    assert torch.equal(sums.to(dtype), y) and not torch.equal(sums, y.float())
    codes, row_scales = (each.double().cpu() for each in fp8_quantize_reference(x))
    both = row_scales[:, None] * scales.double().cpu()
    exact = (codes @ weight.double().cpu().T) * both + bias.double().cpu()
    magnitudes = (codes.abs() @ weight.double().cpu().abs().T) * both + bias.double().cpu().abs()
    slack = (DEPTH + 8) * 2.0**-22 * magnitudes
    bound = 1.01 * (slack + HALF_UNIT[dtype] * (exact.abs() + slack))
    assert bool(((y.double().cpu() - exact).abs() <= bound).all())
    reference = fp8_matmul_reference(x, weight, scales, bias)
    torch.testing.assert_close(y, reference, rtol=2 * HALF_UNIT[dtype], atol=1e-2)


@pytest.mark.drawn(1)
@every_format
def test_bits_depend_on_the_row_and_the_weight_only(dtype: torch.dtype, device: Device) -> None:
    weight, scales = weight_of(device, COLUMNS, DEPTH)
    x = noise(device, dtype, 37, DEPTH)
    whole = fp8_matmul(device, x, weight, scales)
    watched, memory = GridRecorder(device), SplitMemory(device)
    for tile in TILES:
        for first, end in ((0, 37), (5, 6)):
            some = x[first:end]
            assert same(fp8_matmul(watched, some, weight, scales, tile=tile), whole[first:end]), tile
            split = fp8_matmul(watched, some, weight, scales, tile=tile, memory=memory)
            assert same(split, whole[first:end]), tile
    assert not memory.tickets.any()
    assert {grid[1] for grid in watched.grids} == {1, 3}


def test_unsupported_inputs_are_named(device: Device) -> None:
    weight, scales = weight_of(device, 8, 64)
    x = noise(device, torch.bfloat16, 5, 64)
    with pytest.raises(OperandError, match=r"weight: torch\.float32"):
        fp8_matmul(device, x, weight.float(), scales)
    with pytest.raises(OperandError, match="multiple of 16"):
        fp8_matmul(device, x[:, :40], weight[:, :40].contiguous(), scales)
    with pytest.raises(OperandError, match=r"scales: torch.float32\[7\]"):
        fp8_matmul(device, x, weight, scales[:7])
    with pytest.raises(OperandError, match=r"x: torch.float32\[5, 64\]"):
        fp8_matmul(device, x.float(), weight, scales)
    assert fp8_matmul(device, x[:0], weight, scales).shape == (0, 8)
