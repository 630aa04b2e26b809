"""Experts on a device: torch's results, and the same bits in any batch; grouped rows, and matrices by head.

Bounds: sums of products in fp32 in another order, and a rounding of intermediate numbers to the rows' format, where either
side may round the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cuda.kernels.formats import FORMATS, STEP, noise
from tests.cuda.kernels.references import grouped_matmul_reference
from tests.executor.kernels.test_experts_kernels import (
    CLAMPED,
    HIDDEN,
    ROUTINGS,
    SILU,
    correction_of,
    tables_of,
)

from quintet.executor.backends.cpu.ops import experts as by_torch
from quintet.executor.backends.cpu.ops.experts import ExpertTables, Gate
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.experts import experts
from quintet.executor.backends.cuda.ops.linear import OperandError, matmul, tiles_of
from quintet.executor.backends.cuda.ops.linear_groups import (
    grouped_matmul,
    head_matmul,
    tiles_of_groups,
)

COUNTS = {
    "one": [5],
    "none in some": [0, 3, 0, 17, 1, 0],
    "one has all": [0, 0, 33],
    "many": [16, 15, 1, 64, 65, 2],
}


def groups_of(device: Device, counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor(counts, device=device.torch_device).cumsum(0)


def layer_on(device: Device, name: str, dtype: torch.dtype, gate: Gate, biased: bool) -> Any:
    """The attributes of a layer that the computation reads."""
    tables, correction = tables_of(ROUTINGS[name], dtype, biased), correction_of(name)
    where = device.torch_device
    moved = [getattr(tables, field.name) for field in fields(ExpertTables)]
    tables = ExpertTables(*(None if each is None else each.to(where) for each in moved))
    return SimpleNamespace(
        routing=ROUTINGS[name],
        gate=gate,
        tables=tables,
        gate_up=SimpleNamespace(table=tables.gate_up, bias=tables.gate_up_bias),
        down=SimpleNamespace(table=tables.down, bias=tables.down_bias),
        correction=None if correction is None else correction.to(where),
    )


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_in_groups(counts: list[int], dtype: torch.dtype, biased: bool, device: Device) -> None:
    """For each tile size, results equal the reference, and have the bits of each group computed alone."""
    where, num_rows, columns, depth = device.torch_device, sum(counts), 72, 40
    x = noise(num_rows, depth, dtype=dtype, where=where)
    weight = noise(len(counts), columns, depth, dtype=dtype, where=where, seed=1)
    bias = noise(len(counts), columns, dtype=dtype, where=where, seed=2) if biased else None
    ends = groups_of(device, counts)
    expected = grouped_matmul_reference(x, ends, lambda group: weight[group].float(), bias)
    alone, begin = [], 0
    for group, count in enumerate(counts):
        rows = x[begin : begin + count]
        alone.append(matmul(device, rows, weight[group], None if bias is None else bias[group]))
        begin += count
    for tile in tiles_of(dtype):
        tiles = tiles_of_groups(ends, num_rows, tile.rows)
        out = grouped_matmul(device, x, tiles, tile, weight, bias)
        torch.testing.assert_close(
            out, expected, rtol=STEP[dtype], atol=1e-5 if dtype == torch.float32 else 1e-2
        )
        assert torch.equal(out, torch.cat(alone)), tile


def test_matrices_by_head(device: Device) -> None:
    x = noise(5, 3 * 24, dtype=torch.bfloat16, where=device.torch_device)
    weight = noise(3, 20, 24, dtype=torch.bfloat16, where=device.torch_device, seed=1)
    out = head_matmul(device, x, weight)
    by_head = [x[:, 24 * head : 24 * head + 24].float() @ weight[head].float().t() for head in range(3)]
    torch.testing.assert_close(out, torch.cat(by_head, 1).bfloat16(), rtol=STEP[torch.bfloat16], atol=1e-2)
    assert torch.equal(head_matmul(device, x[3:4], weight), out[3:4])


@pytest.mark.parametrize("num_tokens", [1, 17, 70])
@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_equal_the_reference(name: str, gate: Gate, num_tokens: int, device: Device) -> None:
    layer = layer_on(device, name, torch.float32, gate, biased=gate is CLAMPED)
    routing, where = layer.routing, device.torch_device
    x = noise(num_tokens, HIDDEN, dtype=torch.float32, where=where, seed=6)
    scores = noise(num_tokens, routing.experts, dtype=torch.float32, where=where, seed=7)
    chosen = by_torch.route(scores, routing, layer.correction)
    expected = by_torch.experts(x, *chosen, layer.tables, gate, routing.scaled_inputs)
    torch.testing.assert_close(
        experts(device, layer, x, scores), expected, rtol=1e-5, atol=1e-5 * routing.scale
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_bits_of_a_token_do_not_depend_on_the_batch(name: str, dtype: torch.dtype, device: Device) -> None:
    layer = layer_on(device, name, dtype, SILU, biased=False)
    where = device.torch_device
    x = noise(40, HIDDEN, dtype=dtype, where=where, seed=6)
    scores = noise(40, layer.routing.experts, dtype=dtype, where=where, seed=7)
    together = experts(device, layer, x, scores)
    for some in (slice(7, 8), slice(0, 3), slice(23, 40)):
        assert torch.equal(experts(device, layer, x[some], scores[some]), together[some]), some


def test_errors_name_the_tensor(device: Device) -> None:
    where, tile = device.torch_device, tiles_of(torch.bfloat16)[0]
    tiles = tiles_of_groups(groups_of(device, [2, 1]), 3, tile.rows)
    x = noise(3, 40, dtype=torch.bfloat16, where=where)
    weight = noise(2, 8, 40, dtype=torch.bfloat16, where=where)
    with pytest.raises(OperandError, match=r"^weight: torch.bfloat16\[8, 40\]; expected"):
        grouped_matmul(device, x, tiles, tile, weight[0])
    with pytest.raises(OperandError, match=r"^x: .* multiple of 8"):
        grouped_matmul(device, x[:, :36].contiguous(), tiles, tile, weight[:, :, :36].contiguous())
    with pytest.raises(OperandError, match=r"^bias: "):
        grouped_matmul(device, x, tiles, tile, weight, weight[0])
