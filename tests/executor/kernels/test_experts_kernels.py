"""Experts by the host kernels against torch: routing, results, and the same bits in every batch.

Bounds are those of two consecutive linear layers: fp32 sums of products in another order, and a rounding of the hidden
values to the rows' dtype, where either side may round the other way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from quintet.executor.backends.cpu.ops.experts import (
    ExpertTables,
    Gate,
    experts,
    route,
)
from quintet.executor.backends.cpu.ops.host_experts import HostExperts
from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.backends.cpu.ops.host_linear import Inputs, WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.model_config.experts import Routing, Scoring

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

FLOATS = {
    torch.bfloat16: WeightFormat.BF16,
    torch.float16: WeightFormat.FP16,
    torch.float32: WeightFormat.FP32,
}
SILU = Gate(activation=GatedActivation.SILU_AND_MUL)
CLAMPED = Gate(activation=GatedActivation.CLAMPED_SWIGLU, factor=1.702, limit=2.0)
HIDDEN, WIDTH = 96, 72

ROUTINGS = {
    "mixtral": Routing(experts=8, chosen=2, scoring=Scoring.SOFTMAX, renormalise=True),
    "olmoe": Routing(experts=13, chosen=5, scoring=Scoring.SOFTMAX),
    "granite": Routing(experts=33, chosen=4, scoring=Scoring.SOFTMAX_OF_CHOSEN),
    "llama4": Routing(experts=4, chosen=1, scoring=Scoring.SIGMOID, scaled_inputs=True),
    "deepseek v2": Routing(
        experts=16, chosen=3, scoring=Scoring.SOFTMAX, groups=4, chosen_groups=2, group_best=1, scale=16.0
    ),
    "deepseek v3": Routing(
        experts=16,
        chosen=4,
        scoring=Scoring.SIGMOID,
        groups=4,
        chosen_groups=2,
        group_best=2,
        renormalise=True,
        scale=2.5,
    ),
    "lfm2": Routing(experts=8, chosen=3, scoring=Scoring.SIGMOID, renormalise=True, addend=0.2),
    "phi": Routing(experts=9, chosen=2, scoring=Scoring.SPARSE_MIXER, jitter=0.4),
    "all": Routing(experts=3, chosen=3, scoring=Scoring.SIGMOID),
}
WIDE = Inputs.SIXTEEN_BITS
CORRECTED = ("deepseek v3",)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Reset to one thread afterwards."""
    yield
    set_threads(1)


def set_threads(count: int) -> None:
    library = open_library()
    assert library is not None
    declare(library, "qt_set_threads", ctypes.c_int, ctypes.c_int)(count, 0)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables_of(routing: Routing, dtype: torch.dtype, biased: bool) -> ExpertTables:
    count = routing.experts
    return ExpertTables(
        noise(count, 2 * WIDTH, HIDDEN, dtype=dtype, seed=1) * HIDDEN**-0.5,
        noise(count, HIDDEN, WIDTH, dtype=dtype, seed=2) * WIDTH**-0.5,
        noise(count, 2 * WIDTH, dtype=dtype, seed=3) if biased else None,
        noise(count, HIDDEN, dtype=dtype, seed=4) if biased else None,
    )


def pack(table: torch.Tensor, weight_format: WeightFormat, group: int, paired: bool) -> list[PackedWeight]:
    library = linear_library()
    assert library is not None
    packed = [PackedWeight(library, weight_format, *one.shape, group=group, paired=paired) for one in table]
    for weight, one in zip(packed, table, strict=True):
        weight.fill(one)
    return packed


def correction_of(name: str) -> torch.Tensor | None:
    return noise(ROUTINGS[name].experts, seed=5) * 0.3 if name in CORRECTED else None


def packed_experts(
    name: str,
    tables: ExpertTables,
    gate: Gate = SILU,
    weight_format: WeightFormat | None = None,
    group: int = 0,
    inputs: Inputs = WIDE,
    down_format: WeightFormat | None = None,
) -> HostExperts:
    """down_format: format of downs if it differs from gates and ups, without groups and rounded inputs."""
    chosen = FLOATS[tables.down.dtype] if weight_format is None else weight_format
    return HostExperts(
        ROUTINGS[name],
        gate,
        pack(tables.gate_up, chosen, group, True),
        pack(tables.down, down_format or chosen, 0 if down_format else group, False),
        correction=correction_of(name),
        gate_up_bias=tables.gate_up_bias,
        down_bias=tables.down_bias,
        inputs=(inputs, WIDE if down_format else inputs),
    )


@pytest.mark.parametrize("tokens", [1, 3, 17, 150])
@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_equal_the_reference(name: str, gate: Gate, tokens: int) -> None:
    """In fp32, on one thread and on several: 24-bit sums in another order."""
    routing = ROUTINGS[name]
    tables = tables_of(routing, torch.float32, biased=gate is CLAMPED)
    host = packed_experts(name, tables, gate)
    x, scores = noise(tokens, HIDDEN, seed=6), noise(tokens, routing.experts, seed=7)
    ids, weights = route(scores, routing, correction_of(name))
    expected = experts(x, ids, weights, tables, gate, routing.scaled_inputs)
    for threads in (1, 3):
        set_threads(threads)
        torch.testing.assert_close(host(x, scores), expected, rtol=1e-5, atol=1e-5 * routing.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_of_16_bits(dtype: torch.dtype) -> None:
    """A hidden value may round the other way: half a unit, of some dozens that are summed."""
    routing = ROUTINGS["mixtral"]
    tables = tables_of(routing, dtype, biased=True)
    x, scores = noise(9, HIDDEN, dtype=dtype, seed=6), noise(9, routing.experts, dtype=dtype, seed=7)
    expected = experts(x, *route(scores, routing, None), tables, SILU, False)
    unit = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    host = packed_experts("mixtral", tables)
    torch.testing.assert_close(host(x, scores), expected, rtol=4 * unit, atol=8 * unit)


@pytest.mark.parametrize(
    ("weight_format", "group", "inputs", "slack"),
    [
        (WeightFormat.INT8, 0, WIDE, 1e-4),
        (WeightFormat.INT8, 32, Inputs.EIGHT_BITS, 0.05),
        (WeightFormat.INT4, 32, Inputs.EIGHT_BITS_IN_GROUPS, 0.05),
        (WeightFormat.INT4, 32, WIDE, 1e-4),
    ],
)
@pytest.mark.parametrize("down_format", [None, WeightFormat.FP32])
def test_quantized_experts(
    weight_format: WeightFormat, group: int, inputs: Inputs, slack: float, down_format: WeightFormat | None
) -> None:
    """Compared with the dequantized weights; x in 8 bits is off by 2^-8 of its group's largest."""
    routing = ROUTINGS["mixtral"]
    host = packed_experts(
        "mixtral", tables_of(routing, torch.float32, False), SILU, weight_format, group, inputs, down_format
    )
    gate_up, down = host._weights
    tables = ExpertTables(
        *(torch.stack([one.read() for one in each]) for each in (gate_up, down)), None, None
    )
    x, scores = noise(20, HIDDEN, seed=6), noise(20, routing.experts, seed=7)
    expected = experts(x, *route(scores, routing, None), tables, SILU, False)
    torch.testing.assert_close(host(x, scores), expected, rtol=slack, atol=slack)


@pytest.mark.parametrize(
    ("weight_format", "group", "dtype", "inputs"),
    [
        (WeightFormat.BF16, 0, torch.bfloat16, WIDE),
        (WeightFormat.FP16, 0, torch.float16, WIDE),
        (WeightFormat.FP32, 0, torch.float32, WIDE),
        (WeightFormat.INT8, 0, torch.bfloat16, WIDE),
        (WeightFormat.INT8, 0, torch.bfloat16, Inputs.EIGHT_BITS),
        (WeightFormat.INT4, 32, torch.float32, WIDE),
        (WeightFormat.INT4, 32, torch.float32, Inputs.EIGHT_BITS_IN_GROUPS),
    ],
)
@pytest.mark.parametrize("name", ["deepseek v3", "llama4"])
def test_experts_have_the_same_bits_in_every_batch(
    name: str, weight_format: WeightFormat, group: int, dtype: torch.dtype, inputs: Inputs
) -> None:
    """A token alone, in parts of a batch, and on 1, 2 and 40 threads."""
    routing, tokens = ROUTINGS[name], 230
    tables = tables_of(routing, dtype, biased=True)
    host = packed_experts(name, tables, SILU, weight_format, group, inputs)
    x = noise(tokens, HIDDEN, dtype=dtype, seed=6)
    scores = noise(tokens, routing.experts, dtype=dtype, seed=7)
    whole = host(x, scores)
    for threads in (1, 2, 40):
        set_threads(threads)
        for begin, end in ((0, 230), (0, 1), (7, 8), (3, 20), (20, 150), (229, 230)):
            part = host(x[begin:end], scores[begin:end])
            assert torch.equal(part.view(torch.uint8), whole[begin:end].view(torch.uint8)), (
                threads,
                begin,
                end,
            )


def test_equal_scores_select_the_lowest_experts() -> None:
    routing = ROUTINGS["granite"]
    tables = tables_of(routing, torch.float32, False)
    x, scores = noise(2, HIDDEN), torch.zeros(2, routing.experts)
    ids, weights = route(scores, routing, None)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2 and weights.tolist() == [[0.25] * 4] * 2
    expected = experts(x, ids, weights, tables, SILU, False)
    torch.testing.assert_close(packed_experts("granite", tables)(x, scores), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_row_that_is_not_finite_does_not_affect_others(name: str) -> None:
    """Incomparable scores select arbitrary experts, and the results of other rows do not change."""
    routing = ROUTINGS[name]
    host = packed_experts(name, tables_of(routing, torch.float32, False))
    x, scores = noise(5, HIDDEN, seed=6), noise(5, routing.experts, seed=7)
    whole = host(x, scores)
    x[2], scores[2] = torch.nan, torch.nan
    spoilt = host(x, scores)
    assert bool(spoilt[2].isnan().all())
    rest = [0, 1, 3, 4]
    assert torch.equal(spoilt[rest], whole[rest])
