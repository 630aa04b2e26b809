"""Layers of quantized checkpoints on a device: exact numbers of their tensors, kept as codes, and multiplied as codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench.quantization import layers
from bench.quantization.layers import Written
from tests.cuda.kernels.test_linear import HALF_UNIT
from tests.executor.checkpoints.test_formats import (
    DEPTH,
    FLOATS,
    KEPT,
    ROUNDED,
    loaded,
    noise,
    with_another_k,
)

from quintet.executor.backends.cpu.ops.host_linear import WeightFormat
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.gemm_dispatch import DeviceLinears
from quintet.executor.backends.cuda.ops.coded_weight import Code
from quintet.executor.backends.cuda.ops.linear_fp8 import fp8_quantize_reference
from quintet.executor.checkpoints.quant.coded import CodedLinear, CodedRun, Fp8Run
from quintet.executor.checkpoints.quant.packed import RowMajorLinear
from quintet.executor.models.layers.linear import GatedActivation, Linear, RowRange
from quintet.wire.errors import ConfigError

IN_TABLES = {name: written for name, (written, kept, _) in KEPT.items() if kept is WeightFormat.TABLES}
"""Formats that only the host's kernels multiply as stored."""

QKV = [RowRange("q", 96), RowRange("k", 32), RowRange("v", 32)]
"""Layers that are computed as one."""


def held(layer: Linear) -> torch.Tensor:
    """Return the numbers of a layer's coded parts, in the checkpoint's order of inputs."""
    assert isinstance(layer.method, CodedLinear)
    found = []
    for part in layer.method.parts:
        if isinstance(part, Fp8Run):
            found.append(part.weight.float().cpu() * part.scales.cpu()[:, None])
            continue
        assert isinstance(part, CodedRun)
        numbers = part.weight.floats().cpu()
        if part.order is not None:
            inputs = part.order.cpu().long()
            numbers = torch.empty_like(numbers).index_copy_(1, inputs, numbers)
        found.append(numbers)
    return torch.cat(found)


def product(device: Device, layer: Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and the device's product."""
    x = torch.from_numpy(noise(3, seed=4)).bfloat16()
    return x, DeviceLinears(device, batch_invariant=True).apply(layer, x.to(device.torch_device)).cpu()


def check(y: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor) -> None:
    """Compare within half a unit of bf16, and the truncation of a matrix instruction (`tests.cuda.kernels.test_linear`)."""
    exact = x.double() @ numbers.double().t()
    slack = (DEPTH + 8) * 2.0**-22 * (x.double().abs() @ numbers.double().abs().t())
    bound = 1.01 * (slack + HALF_UNIT[torch.bfloat16] * (exact.abs() + slack))
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", [name for name in KEPT if name not in IN_TABLES])
def test_layer_has_the_numbers_of_the_checkpoint(name: str, device: Device) -> None:
    layer, numbers = loaded(KEPT[name][0], QKV, where=device.torch_device)
    whole = torch.cat([numbers[part.name] for part in QKV])
    assert torch.equal(held(layer), whole)
    x, y = product(device, layer)
    assert isinstance(layer.method, CodedLinear)
    has_fp8_inputs = name in ("fp8, one scale", "fp8, of fbgemm")
    assert [isinstance(part, Fp8Run) for part in layer.method.parts] == [has_fp8_inputs]
    if not has_fp8_inputs:
        check(y, x, whole)
    reference = layer(x.to(device.torch_device)).cpu()
    torch.testing.assert_close(y, reference, rtol=2 * HALF_UNIT[torch.bfloat16], atol=1e-3)


def test_parts_in_other_formats_write_their_own_columns(device: Device) -> None:
    """8 bits next to 4; an order of inputs; and parts without codes."""
    for other in ({"bits": 8}, {"sym": False}, {"desc_act": True}):
        layer, numbers = loaded(with_another_k(other), QKV, where=device.torch_device)
        assert isinstance(layer.method, CodedLinear) and layer.method.widths == [96, 32, 32]
        whole = torch.cat([numbers[part.name] for part in QKV])
        assert torch.equal(held(layer), whole)
        x, y = product(device, layer)
        check(y, x, whole)
    plain = torch.from_numpy(np.random.default_rng(7).standard_normal((32, DEPTH))).bfloat16()
    written = KEPT["gptq, 4 bits"][0]
    layer, numbers = loaded(written, QKV, plain={"k.weight": plain}, where=device.torch_device)
    assert isinstance(layer.method, CodedLinear)
    assert [type(part) for part in layer.method.parts] == [CodedRun, RowMajorLinear, CodedRun]
    x, y = product(device, layer)
    check(y, x, torch.cat([numbers["q"], plain.float(), numbers["v"]]))


@pytest.mark.parametrize("groups", [1, 2])
def test_rows_of_one_tensor_at_any_positions(groups: int, device: Device) -> None:
    parts = [RowRange("qkv", 72, 120, 0, groups), RowRange("qkv", 24, 120, 72 // groups, groups)]
    layer, numbers = loaded(KEPT["awq"][0], parts, where=device.torch_device)
    pieces = numbers["qkv"].reshape(groups, -1, DEPTH)
    begins = {72: 0, 24: 72 // groups}
    rows = [
        pieces[:, begin : begin + count // groups].reshape(count, DEPTH) for count, begin in begins.items()
    ]
    assert torch.equal(held(layer), torch.cat(rows))


def test_gates_and_ups_are_halves_of_the_result(device: Device) -> None:
    parts = [RowRange("gate", 64), RowRange("up", 64)]
    layer, numbers = loaded(KEPT["awq"][0], parts, GatedActivation.SILU_AND_MUL, where=device.torch_device)
    x, y = product(device, layer)
    check(y, x, torch.cat([numbers["gate"], numbers["up"]]))
    gate, up = y.float().chunk(2, dim=1)
    torch.testing.assert_close(
        layer(x.to(device.torch_device)).cpu().float(),
        torch.nn.functional.silu(gate) * up,
        rtol=3 * 2.0**-8,  # the gate, its activation and the product are rounded
        atol=1e-3,
    )


@pytest.mark.parametrize("name", ROUNDED | IN_TABLES)
def test_unsupported_format_is_rounded_once(name: str, device: Device) -> None:
    layer, numbers = loaded(
        (ROUNDED | IN_TABLES)[name], [RowRange("q", 96), RowRange("k", 32)], where=device.torch_device
    )
    assert layer.method.table is not None
    assert torch.equal(layer.method.table.cpu(), torch.cat([numbers["q"], numbers["k"]]).bfloat16())


def test_weight_with_nan_is_rejected(device: Device) -> None:
    written = layers.compressed(
        FLOATS | {"strategy": "channel"},
        "float-quantized",
        tensors=layers.eight_bit_floats("weight_scale", (1, 0)),
    )

    def with_nan(name: str, weight: layers.Array) -> tuple[layers.Tensors, layers.Array]:
        tensors, numbers = written.tensors(name, weight)
        tensors["weight"].view(torch.uint8)[3, 5] = 0x7F
        return tensors, numbers

    with pytest.raises(ConfigError, match="layer 'q': some fp8 codes are NaN"):
        loaded(Written(written.section, with_nan), [RowRange("q", 96)], where=device.torch_device)


def test_inputs_are_rounded_to_fp8_as_the_checkpoint_declares(device: Device) -> None:
    """By row or for the whole tensor; with blocks, or without a declaration, inputs keep the model's dtype."""
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    by_row = layers.eight_bit_floats("weight_scale", (1, 0))
    for requested in (inputs, None):
        written = layers.compressed(
            FLOATS | {"strategy": "channel"}, "float-quantized", requested, tensors=by_row
        )
        layer, numbers = loaded(written, QKV, where=device.torch_device)
        x, y = product(device, layer)
        whole = torch.cat([numbers[part.name] for part in QKV])
        if requested is None:
            check(y, x, whole)
            continue
        codes, scales = fp8_quantize_reference(x)
        exact = codes.double() * scales.double()[:, None] @ whole.double().t()
        torch.testing.assert_close(y.double(), exact, rtol=2 * HALF_UNIT[torch.bfloat16], atol=1e-3)


def test_codes_take_their_number_of_bytes(device: Device) -> None:
    layer, _ = loaded(KEPT["gptq, 4 bits"][0], QKV, where=device.torch_device)
    assert isinstance(layer.method, CodedLinear)
    (part,) = layer.method.parts
    assert isinstance(part, CodedRun) and part.weight.layout.code is Code.INT4
    rows, inputs = 192, 192  # whole tiles and bricks
    assert part.weight.layout.num_bytes == rows * inputs // 2 + 4 * rows * 2
