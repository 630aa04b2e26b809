"""Rows of GGUF files on a device: bit-exact numbers of ggml, kept as codes, and multiplied as codes."""

from __future__ import annotations

import pytest
import torch
from tests.cuda.kernels.test_linear import HALF_UNIT, noise
from tests.cuda.test_worker import RowMajor
from tests.executor.kernels.gguf_blocks import random_rows

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.gemm_dispatch import DeviceLinears
from quintet.executor.checkpoints.gguf.weights import BLOCKS
from quintet.executor.checkpoints.quant.blocks import PACKED_FORMATS
from quintet.executor.checkpoints.quant.coded import KEPT_BLOCKS, CodedLinear, CodedRun
from quintet.executor.checkpoints.quant.gguf import GgufQuantization
from quintet.executor.checkpoints.quant.method import LinearShape
from quintet.executor.checkpoints.quant.packed import RowMajorLinear
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.models.layers.linear import GatedActivation, Linear, RowRange

DEPTH = 256


def loaded(
    kinds: dict[str, str], device: Device, activation: GatedActivation = GatedActivation.NONE
) -> tuple[Linear, torch.Tensor]:
    """Return a layer with parts of 48 rows, each of one type or in floating-point numbers, and its numbers."""
    contents, tensors, numbers = {}, {}, []
    for seed, (part, kind) in enumerate(kinds.items()):
        if kind == "BF16":
            whole = torch.randn(48, DEPTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
            tensors[f"{part}.weight"] = whole
            contents[f"{part}.weight"] = Entry("BF16", (48, DEPTH), 0, 0)
            numbers.append(whole.float())
            continue
        raw, stands_for = random_rows(PACKED_FORMATS[kind].weight_format, 48, DEPTH, seed)
        tensors[part + BLOCKS] = raw
        contents[part + BLOCKS] = Entry(kind, tuple(raw.shape), 0, 0)
        numbers.append(stands_for)
    plan = WeightPlan(torch.bfloat16, device.torch_device)
    quantization = GgufQuantization(contents, RowMajor(), on_device=True)
    shape = LinearShape([RowRange(name, 48) for name in kinds], DEPTH, activation=activation)
    layer = Linear(quantization, plan, shape)
    for name, expected in plan.expected.items():
        for sink in (*expected.sinks, *expected.packers):
            sink(tensors[name])
    return layer, torch.cat(numbers)


def check(device: Device, layer: Linear, numbers: torch.Tensor) -> None:
    """Compare a product with fp64, within half a unit and the truncation bound of `tests.cuda.kernels.test_linear`.

    Types with minima sum the minima and their terms separately: both are in the bound.
    """
    assert isinstance(layer.method, CodedLinear)
    minima = [part.weight.minima for part in layer.method.parts if isinstance(part, CodedRun)]
    least = max((float(each.abs().max()) for each in minima if each is not None), default=0.0)
    x = noise(device, torch.bfloat16, 3, DEPTH)
    y = DeviceLinears(device, batch_invariant=True).apply(layer, x).double().cpu()
    wide = x.double().cpu()
    exact = wide @ numbers.double().t()
    slack = (DEPTH + 8) * 2.0**-22 * (wide.abs() @ (numbers.double().abs() + 2 * least).t())
    bound = 1.01 * (slack + HALF_UNIT[torch.bfloat16] * (exact.abs() + slack))
    assert bool(((y - exact).abs() <= bound).all())


@pytest.mark.parametrize("kind", KEPT_BLOCKS)
def test_each_type_is_bit_exact(kind: str, device: Device) -> None:
    layer, numbers = loaded({"q": kind}, device)
    assert isinstance(layer.method, CodedLinear)
    (part,) = layer.method.parts
    assert isinstance(part, CodedRun)
    assert torch.equal(part.weight.floats().cpu(), numbers)
    check(device, layer, numbers)


def test_parts_of_other_types_write_their_own_columns(device: Device) -> None:
    """Parts of different types, as in half of the layers of a Q4_K_M file; unquantized parts; gate and up of different types."""
    layer, numbers = loaded({"q": "Q4_K", "k": "Q4_K", "v": "Q6_K"}, device)
    assert isinstance(layer.method, CodedLinear) and layer.method.widths == [96, 48]
    check(device, layer, numbers)
    layer, numbers = loaded({"q": "Q8_0", "k": "BF16"}, device)
    assert isinstance(layer.method, CodedLinear)
    assert [type(part) for part in layer.method.parts] == [CodedRun, RowMajorLinear]
    check(device, layer, numbers)
    layer, numbers = loaded({"gate": "Q4_K", "up": "MXFP4"}, device, GatedActivation.SILU_AND_MUL)
    assert isinstance(layer.method, CodedLinear) and layer.method.widths == [48, 48]
    check(device, layer, numbers)


def test_every_type_packed_by_the_host_is_kept() -> None:
    assert KEPT_BLOCKS.keys() == PACKED_FORMATS.keys()
