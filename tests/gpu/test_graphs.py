"""Row ``steps`` of docs/gpu.md, second half: graphs with a cuBLAS product are captured, dropped, and captured again."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from quintet.executor.backends.cuda.device import Device

Capture = Callable[[Device], Callable[[Callable[[], None]], Callable[[], None]]]


@pytest.mark.parametrize(
    "capture", [lambda device: device.capture, lambda device: device.capture_timing], ids=["step", "timing"]
)
def test_product_is_captured_again_after_a_drop(device: Device, capture: Capture) -> None:
    x = torch.randn(8, 64, device=device.torch_device)
    out = torch.empty(8, 8, device=device.torch_device)

    def product() -> None:
        torch.mm(x, x.t(), out=out)

    for _ in range(3):
        product()
        replay = capture(device)(product)
        out.zero_()
        replay()
        device.synchronize()
        torch.testing.assert_close(
            out.cpu(), x.cpu() @ x.cpu().t(), rtol=1e-4, atol=1e-4
        )  # another order of sums
        del replay
        gc.collect()


def test_step_graph_replays_after_timing_graphs_were_dropped(device: Device) -> None:
    x = torch.randn(8, 64, device=device.torch_device)
    out, scratch = (torch.empty(8, 8, device=device.torch_device) for _ in range(2))

    def product_into(result: torch.Tensor) -> Callable[[], None]:
        def product() -> None:
            torch.mm(x, x.t(), out=result)

        return product

    product_into(out)()
    replay = device.capture(product_into(out))
    for _ in range(3):
        device.capture_timing(product_into(scratch))()
        gc.collect()
    out.zero_()
    replay()
    device.synchronize()
    torch.testing.assert_close(
        out.cpu(), x.cpu() @ x.cpu().t(), rtol=1e-4, atol=1e-4
    )  # another order of sums
