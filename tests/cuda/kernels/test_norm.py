"""Norms on the device against torch, on widths around the limits of a thread, a block and its registers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.cuda.kernels.formats import FORMATS, assert_within_steps, noise, small_integers

from quintet.executor.backends.cpu.ops.rms_norm import rms_norm as reference
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
)

EPS = 1e-5
WIDTHS = [1, 8, 100, 2047, 2048, 2056, 4096, 4104, 8200]
"""Narrower than a warp; no multiple of a pack, short and long; at and past the register limit of 256 threads for fp32 and
16 bits, and past that of 1024 threads for fp32.
"""


def max_steps(dtype: torch.dtype) -> int:
    """Return the error bound in steps: the mean is summed in another order.

    In fp32 the factor is then a few steps off. In 16 bits the normed number may round to the other side, and after the
    weight it is up to two steps off.
    """
    return 8 if dtype == torch.float32 else 2


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(device: Device, width: int, dtype: torch.dtype) -> None:
    x = noise(3, width, dtype=dtype, where=device.torch_device)
    weight = noise(width, dtype=dtype, where=device.torch_device, seed=1)
    steps = max_steps(dtype)
    assert_within_steps(rms_norm(device, x, weight, EPS), reference(x, weight, EPS), steps)
    assert_within_steps(rms_norm(device, x, None, EPS), reference(x, None, EPS), steps)
    gemma = rms_norm(device, x, weight, EPS, offset=1.0)
    assert_within_steps(gemma, reference(x, weight, EPS, 1.0), steps)
    once = rms_norm(device, x, weight, EPS, rounds_once=True)
    assert_within_steps(once, reference(x, weight, EPS, rounds_once=True), steps)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", [2, 64, 4096, 8192])
def test_rms_norm_equals_the_reference_where_the_sum_is_exact(
    device: Device, width: int, dtype: torch.dtype
) -> None:
    """All roundings are where the reference has them. Widths are powers of two: dividing by them is exact too."""
    x = small_integers(3, width, dtype=dtype, where=device.torch_device)
    weight = noise(width, dtype=dtype, where=device.torch_device, seed=1)
    assert torch.equal(rms_norm(device, x, weight, EPS), reference(x, weight, EPS))
    residual = small_integers(3, width, dtype=dtype, where=device.torch_device, seed=2)
    expected = residual + x
    before = residual.clone()
    total, normed = add_rms_norm(device, x, residual, weight, EPS)
    assert torch.equal(normed, reference(expected, weight, EPS))
    assert torch.equal(total, expected)
    assert torch.equal(residual, before)


def test_rms_norm_of_the_widest_rows(device: Device) -> None:
    """65 536 numbers: most of the row is read a second time."""
    x = noise(2, 65536, dtype=torch.bfloat16, where=device.torch_device)
    residual, weight = x.flip(1).contiguous(), x[0].contiguous()
    expected = residual + x
    total, out = add_rms_norm(device, x, residual, weight, EPS)
    assert torch.equal(total, expected)
    assert_within_steps(out, reference(expected, weight, EPS), 2)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(device: Device, width: int, dtype: torch.dtype, biased: bool) -> None:
    where = device.torch_device
    x = noise(3, width, dtype=dtype, where=where) + 3
    weight = noise(width, dtype=dtype, where=where, seed=1)
    bias = noise(width, dtype=dtype, where=where, seed=2) if biased else None
    expected = F.layer_norm(x.float(), (width,), weight.float(), None if bias is None else bias.float(), EPS)
    # Numbers near the mean, and sums of product and bias near 0, keep the absolute error of fp32 numbers around 3: a
    # few times 2^-22, scaled by at most 1 / sqrt(eps) in rows of one number, else by about 1.
    floor = 1e-5 if width > 1 else 1e-3
    out = layer_norm(device, x, weight, bias, EPS)
    assert_within_steps(out, expected.to(dtype), max_steps(dtype), floor)
    plain = F.layer_norm(x.float(), (width,), eps=EPS).to(dtype)
    out = layer_norm(device, x, None, None, EPS)
    assert_within_steps(out, plain, max_steps(dtype), floor)


@pytest.mark.parametrize("width", [24, 100, 4104])
def test_residual_sum_is_rounded_before_the_norm(device: Device, width: int) -> None:
    where, dtype = device.torch_device, torch.bfloat16
    x, residual = (noise(3, width, dtype=dtype, where=where, seed=i) for i in range(2))
    weight, bias = (noise(width, dtype=dtype, where=where, seed=2 + i) for i in range(2))
    expected = residual + x
    total, normed = add_rms_norm(device, x, residual, weight, EPS)
    assert torch.equal(total, expected)
    assert torch.equal(normed, rms_norm(device, expected, weight, EPS))
    total, normed = add_layer_norm(device, x, residual, weight, bias, EPS)
    assert torch.equal(total, expected)
    assert torch.equal(normed, layer_norm(device, expected, weight, bias, EPS))
    for_one, normed = add_rms_norm(device, x, residual, weight, EPS, total=residual)
    assert for_one is residual
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("width", [100, 512, 4104])
def test_bits_of_a_row_do_not_depend_on_the_batch(device: Device, width: int) -> None:
    where = device.torch_device
    x = noise(7, width, dtype=torch.float32, where=where)
    weight = noise(width, dtype=torch.float32, where=where, seed=1)
    together = rms_norm(device, x, weight, EPS), layer_norm(device, x, weight, weight, EPS)
    for i in range(len(x)):
        alone = x[i : i + 1]
        assert torch.equal(rms_norm(device, alone, weight, EPS)[0], together[0][i])
        assert torch.equal(layer_norm(device, alone, weight, weight, EPS)[0], together[1][i])


def test_in_place_and_strided_rows(device: Device) -> None:
    wide = noise(5, 96, dtype=torch.float16, where=device.torch_device)
    weight = noise(64, dtype=torch.float16, where=device.torch_device, seed=1)
    x = wide[:, :64]
    expected = rms_norm(device, x.contiguous(), weight, EPS)
    assert torch.equal(rms_norm(device, x, weight, EPS), expected)
    own = x.contiguous()
    assert rms_norm(device, own, weight, EPS, out=own) is own
    assert torch.equal(own, expected)


def test_no_rows(device: Device) -> None:
    weight = noise(64, dtype=torch.float16, where=device.torch_device)
    assert rms_norm(device, weight[None][:0], weight, EPS).shape == (0, 64)


def test_invalid_tensor_is_named(device: Device) -> None:
    where = device.torch_device
    x, weight = (noise(*shape, dtype=torch.float16, where=where) for shape in ((4, 64), (64,)))
    with pytest.raises(ValueError, match=r"weight: expected contiguous torch.float16\[64\]"):
        rms_norm(device, x, weight[:32], EPS)
    with pytest.raises(ValueError, match=r"x: expected .* rows contiguous"):
        rms_norm(device, x.T, weight, EPS)
    with pytest.raises(ValueError, match=r"residual: expected torch.float16"):
        add_rms_norm(device, x, x.float(), weight, EPS)
    with pytest.raises(ValueError, match="x: expected rows aligned to 16 bytes"):
        rms_norm(device, x.view(-1)[1:193].view(3, 64), weight, EPS)
    with pytest.raises(ValueError, match=r"dtype: expected one of torch\.bfloat16"):
        rms_norm(device, x.double(), weight, EPS)
