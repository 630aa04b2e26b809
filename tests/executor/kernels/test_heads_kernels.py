"""Linear layers per head against torch, and the same bits in every batch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from quintet.executor.backends.cpu.ops.host_library import open_library, set_threads
from quintet.executor.checkpoints.quant.packed import Unquantized
from quintet.executor.checkpoints.quant.stack import RowMajorStack, StackMethod, StackPiece, StackShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.checkpoints.weights.store import reserve
from quintet.executor.models.layers.linear import HeadLinear

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

HEADS, COLUMNS, DEPTH = 5, 70, 40


class RowMajor:
    """Builds the matrices that torch multiplies."""

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        return RowMajorStack(shape, plan)


@pytest.fixture(params=[1, 3])
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """Run with this number of threads; reset to one afterwards."""
    library = open_library()
    assert library is not None
    set_threads(library, request.param, False)
    yield library
    set_threads(library, 1, False)


def layer(quantization: Unquantized | RowMajor, dtype: torch.dtype) -> HeadLinear:
    piece = StackPiece(("w",), ((HEADS, COLUMNS, DEPTH),), 0, HEADS, 0, lambda tensors, i: tensors[0][i])
    shape = StackShape(
        label="w", experts=HEADS, columns=COLUMNS, depth=DEPTH, paired=False, weights=[piece], is_exact=True
    )
    plan = WeightPlan(dtype, torch.device("cpu"))
    made = HeadLinear(quantization, plan, shape)
    plan.reservation = reserve(plan.stores)
    for sink in (*plan.expected["w"].sinks, *plan.expected["w"].packers):
        sink(torch.randn(HEADS, COLUMNS, DEPTH, generator=torch.Generator().manual_seed(1)).to(dtype))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_heads_equal_the_reference(library: ctypes.CDLL, tokens: int, dtype: torch.dtype) -> None:
    """Sums of 40 products in another order, rounded once: a unit of the result, or of the largest term."""
    x = torch.randn(tokens, HEADS * DEPTH, generator=torch.Generator().manual_seed(2)).to(dtype)
    ours, theirs = layer(Unquantized(), dtype), layer(RowMajor(), dtype)
    unit = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    torch.testing.assert_close(ours(x), theirs(x), rtol=2 * unit, atol=40 * unit if unit < 1e-6 else unit)
    assert torch.equal(ours(x[-1:]).view(torch.uint8), ours(x)[-1:].view(torch.uint8))
