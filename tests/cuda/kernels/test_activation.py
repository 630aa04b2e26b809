"""Gated activations on the device against torch."""

from __future__ import annotations

import pytest
import torch
from tests.cuda.kernels.formats import FORMATS, assert_within_steps, noise
from tests.cuda.kernels.references import gated_reference

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.activation import Gate, gated


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize("width", [8, 100, 255, 2056])
def test_gated(device: Device, gate: Gate, dtype: torch.dtype, width: int) -> None:
    """Widths below, at and past a block of packs and of single numbers.

    Exponential and tanh of two libraries differ by a step or two of fp32. The gate may then round to the other side,
    and the product once more. GELU near -4 cancels: 1 + tanh keeps an absolute precision of about 2^-23, and its factor
    is up to 10.
    """
    x = 2 * noise(3, 2 * width, dtype=dtype, where=device.torch_device)
    steps = 16 if dtype == torch.float32 else 2
    out, expected = gated(device, x, gate), gated_reference(x, gate)
    assert_within_steps(out, expected, steps, floor=1e-5)
    if dtype != torch.float32 and width > 1000:
        # fp32 steps across a rounding midpoint of 16 bits are one in a thousand; without the gate's own rounding a
        # quarter of the numbers would differ.
        assert (out == expected).float().mean() > 0.98


@pytest.mark.parametrize("gate", Gate)
def test_extreme_numbers(device: Device, gate: Gate) -> None:
    """Exponentials overflow, results do not; NaN stays. (torch itself returns NaN for an infinite gate.)"""
    gates = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 1e30, torch.nan]])
    x = torch.cat((gates, torch.ones(1, 8)), 1).to(device.torch_device)
    out = gated(device, x, gate)
    assert out[0, 7].isnan()
    assert_within_steps(out[:, :7], gated_reference(x, gate)[:, :7], 1)


def test_bits_of_a_row_do_not_depend_on_the_batch(device: Device) -> None:
    x = noise(5, 2 * 72, dtype=torch.bfloat16, where=device.torch_device)
    together = gated(device, x, Gate.SILU)
    for i in range(len(x)):
        assert torch.equal(gated(device, x[i : i + 1], Gate.SILU)[0], together[i])


def test_output_tensor_and_strided_rows(device: Device) -> None:
    wide = noise(5, 48, dtype=torch.float16, where=device.torch_device)
    out = torch.empty((5, 16), dtype=torch.float16, device=device.torch_device)
    assert gated(device, wide[:, :32], Gate.GELU, out) is out
    assert torch.equal(out, gated(device, wide[:, :32].contiguous(), Gate.GELU))


def test_invalid_tensor_is_named(device: Device) -> None:
    x = noise(5, 32, dtype=torch.float16, where=device.torch_device)
    with pytest.raises(ValueError, match="x: expected an even row width"):
        gated(device, x.view(-1)[:24].view(8, 3), Gate.SILU)
    with pytest.raises(ValueError, match=r"out: expected torch.float16\[5, 16\]"):
        gated(device, x, Gate.SILU, x)
