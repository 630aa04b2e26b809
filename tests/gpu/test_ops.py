"""Row ``kernels`` of docs/gpu.md, second half: torch's operations on the device equal those on the processor, on odd shapes."""

from __future__ import annotations

import pytest
import torch

from quintet.executor.backends.cpu.ops.linear import GatedActivation, linear
from quintet.executor.backends.cpu.ops.rms_norm import rms_norm
from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.sampling.draw import argmax

SHAPES = [(1, 8), (3, 130), (257, 1030)]


@pytest.mark.parametrize("shape", SHAPES)
def test_ops_norm_and_activation(shape: tuple[int, int], device_name: str) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[1])
    torch.testing.assert_close(
        rms_norm(x.to(device_name), weight.to(device_name), 1e-6).cpu(), rms_norm(x, weight, 1e-6)
    )
    gate_up = torch.randn(20, shape[1]) * shape[1] ** -0.5
    gated = linear(x.to(device_name), gate_up.to(device_name), None, GatedActivation.SILU_AND_MUL).cpu()
    torch.testing.assert_close(
        gated, linear(x, gate_up, None, GatedActivation.SILU_AND_MUL), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ops_argmax_takes_the_lowest_of_equals(
    shape: tuple[int, int], dtype: torch.dtype, device_name: str
) -> None:
    logits = torch.randn(shape).round().to(dtype)
    lowest = (logits == logits.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)
    assert torch.equal(argmax(logits.to(device_name)).cpu(), lowest)


def test_ops_of_much_shared_memory_request_the_maximum_carveout(device: Device, device_name: str) -> None:
    if device_name == "cpu":
        pytest.skip("the emulator has no shared-memory carveout")
    from quintet.executor.backends.cuda.cupy_device import CARVEOUT_BYTES, CupyDevice

    assert isinstance(device, CupyDevice)
    kernel = Kernel("norm", "rms_norm_bf16", "plplpppiffi")
    launcher = device._launcher(kernel, CARVEOUT_BYTES)
    assert launcher.kernel.preferred_shared_memory_carveout == 100
