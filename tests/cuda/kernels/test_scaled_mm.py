"""Use of ``torch._scaled_mm`` for fp8 products: many rows of supported shapes, where its results agree with our kernel."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.gemm_dispatch import DeviceLinears
from quintet.executor.backends.cuda.ops.linear_fp8 import FP8, fp8_matmul
from quintet.executor.backends.cuda.scaled_mm import MIN_ROWS, ScaledMm
from quintet.executor.checkpoints.quant.coded import CodedLinear, Fp8Run
from quintet.executor.models.layers.linear import Linear

BF16 = torch.bfloat16


def run_of(device: Device, columns: int = 48, depth: int = 64, biased: bool = False) -> Fp8Run:
    run = Fp8Run.__new__(Fp8Run)
    random = torch.Generator().manual_seed(2)
    run.weight = torch.randn(columns, depth, generator=random).to(FP8).to(device.torch_device)
    run.scales = (torch.rand(columns, generator=random) + 0.5).to(device.torch_device)
    run.bias = torch.randn(columns, generator=random).to(BF16).to(device.torch_device) if biased else None
    return run


def layer_of(run: Fp8Run, result_dtype: torch.dtype | None = None) -> Linear:
    method = CodedLinear.__new__(CodedLinear)
    method.parts, method.widths = [run], [len(run.weight)]
    shape = SimpleNamespace(result_dtype=result_dtype)
    return cast("Linear", SimpleNamespace(method=method, shape=shape, columns=len(run.weight)))


@pytest.mark.parametrize("biased", [False, True])
def test_library_computes_many_rows_only(
    device: Device, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    library = torch._scaled_mm

    def counted(x: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(len(x))
        return library(x, *arguments, **named)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    run = run_of(device, biased=biased)
    linears = DeviceLinears(device, batch_invariant=False)
    linears.measure([layer_of(run)], lambda launch: 1.0)
    for num_rows, is_ours in ((MIN_ROWS - 1, True), (MIN_ROWS, False)):
        x = torch.randn(num_rows, 64).to(BF16).to(device.torch_device)
        calls.clear()
        found = linears.apply(layer_of(run), x)
        assert calls == ([] if is_ours else [num_rows])
        ours = fp8_matmul(device, x, run.weight, run.scales, run.bias)
        torch.testing.assert_close(found, ours, rtol=2.0**-6, atol=2.0**-5)  # bf16, rounded twice with a bias
        if is_ours:
            assert torch.equal(found, ours)


def test_float32_products_use_own_kernel(device: Device) -> None:
    """The library rounds its own results to bf16."""
    run = run_of(device)
    linears = DeviceLinears(device, batch_invariant=False)
    linears.measure([layer_of(run)], lambda launch: 1.0)
    x = torch.randn(MIN_ROWS, 64).to(BF16).to(device.torch_device)
    found = linears.apply(layer_of(run, torch.float32), x)
    assert found.dtype is torch.float32
    assert torch.equal(found.to(BF16), fp8_matmul(device, x, run.weight, run.scales))
    assert not torch.equal(found, found.to(BF16).float())


def test_batch_invariant_products_use_own_kernel(device: Device) -> None:
    run = run_of(device)
    linears = DeviceLinears(device, batch_invariant=True)
    linears.measure([layer_of(run)], lambda launch: 1.0)
    x = torch.randn(100, 64).to(BF16).to(device.torch_device)
    assert torch.equal(
        linears.apply(layer_of(run), x), fp8_matmul(device, x, run.weight, run.scales, run.bias)
    )


def test_library_with_wrong_results_is_not_used(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_large(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        return (1.5 * (a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", too_large)
    library, run = ScaledMm(device), run_of(device)
    with caplog.at_level(logging.INFO, "quintet"):
        library.probe([run])
    assert not library.supports(run, 100, BF16)
    assert "_scaled_mm differs by" in caplog.text


def test_library_that_raises_is_not_used(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*operands: object, **more: object) -> torch.Tensor:
        raise RuntimeError("only bf16 output is supported\nand a trace")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    library, run = ScaledMm(device), run_of(device)
    with caplog.at_level(logging.INFO, "quintet"):
        library.probe([run])
    assert not library.supports(run, 100, BF16)
    assert "only bf16 output is supported" in caplog.text and "trace" not in caplog.text


def test_unsupported_shapes_use_own_kernel(device: Device) -> None:
    library, run = ScaledMm(device), run_of(device, columns=24)
    library.probe([run])
    assert not library.supports(run, 100, BF16)
