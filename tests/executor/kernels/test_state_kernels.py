"""Kernels with a recurrent state: against the references, and the same bits for every split of a request.

Tolerance: 16-bit results may round the other way, by a unit in the last place of the largest term (SiLU of a convolution: also
of its rounded argument). In fp32, the rounding of sums of up to 256 terms in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.executor.kernels.operations import states as state_operations
from tests.executor.kernels.state_problems import SHAPES, rows_of

from quintet.executor.backends.cpu.ops.host_library import open_library
from quintet.executor.backends.cpu.ops.states import causal_conv, delta_rule, head_scan, selective_scan

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

REFERENCES: Any = SimpleNamespace(
    causal_conv=causal_conv, selective_scan=selective_scan, head_scan=head_scan, delta_rule=delta_rule
)
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-17}

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
shapes = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this number of threads."""
    library = open_library()
    assert library is not None
    library.qt_set_threads(request.param, 0)
    yield request.param
    library.qt_set_threads(1, 0)


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    largest = float(expected.float().abs().max())
    torch.testing.assert_close(
        out.float(), expected.float(), rtol=2 * UNIT[dtype], atol=UNIT[dtype] * largest / 4
    )


@dtypes
@shapes
def test_state_kernels_equal_the_reference(shape: str, dtype: torch.dtype) -> None:
    counts = [3, 1, 21, 9]
    problem = SHAPES[shape](sum(counts), dtype)
    rows = rows_of(counts, [5, 0, 2, 1])
    states, expected_states = problem.states(6), problem.states(6)
    close(problem.run(state_operations, rows, states), problem.run(REFERENCES, rows, expected_states), dtype)
    for block in (5, 0, 2, 1):
        close(states[block], expected_states[block], problem.state_dtype)
    assert states[3].isnan().all() and states[4].isnan().all(), "an unused block was written"


@dtypes
@shapes
def test_a_state_continues_in_another_block(shape: str, dtype: torch.dtype) -> None:
    counts = [4, 1, 10]
    problem = SHAPES[shape](sum(counts), dtype)
    states = problem.states(8)
    states[:3] = torch.randn(3, *problem.state_shape, generator=torch.Generator().manual_seed(9)).to(
        problem.state_dtype
    )
    before = states.clone()
    rows = rows_of(counts, [0, 1, 2], [3, 1, 7], [False, False, True])
    expected_states = states.clone()
    close(problem.run(state_operations, rows, states), problem.run(REFERENCES, rows, expected_states), dtype)
    for block in (3, 1, 7):
        close(states[block], expected_states[block], problem.state_dtype)
    assert torch.equal(states[[0, 2]], before[[0, 2]]), "a row wrote its source block"


@dtypes
@shapes
def test_a_request_has_the_same_bits_in_any_chunks(shape: str, dtype: torch.dtype) -> None:
    """Whole, token by token, in chunks, in a batch, and from block to block."""
    num_tokens = 26
    problem = SHAPES[shape](num_tokens, dtype)
    whole = problem.states(1)
    expected = problem.run(state_operations, rows_of([num_tokens], [0]), whole)
    for cuts in ([*range(num_tokens)], [0, 1, 8, 17], [0, 9], [0, 16, 24, 25]):
        states = problem.states(3)
        pieces = []
        for number, (begin, end) in enumerate(zip(cuts, [*cuts[1:], num_tokens], strict=True)):
            rows = rows_of([end - begin], [number % 2], [(number + 1) % 2], [begin == 0])
            pieces.append(problem.run(state_operations, rows, states, slice(begin, end)))
        assert torch.equal(torch.cat(pieces), expected), cuts
        assert torch.equal(states[len(cuts) % 2], whole[0]), cuts


@shapes
def test_a_request_has_the_same_bits_in_every_batch(shape: str) -> None:
    counts = [1, 17, 1, 8, 30, 2]
    problem = SHAPES[shape](sum(counts), torch.bfloat16)
    states = problem.states(len(counts))
    together = problem.run(state_operations, rows_of(counts, range(len(counts))), states)
    begin = 0
    for number, count in enumerate(counts):
        alone = problem.states(1)
        tokens = slice(begin, begin + count)
        assert torch.equal(
            problem.run(state_operations, rows_of([count], [0]), alone, tokens), together[tokens]
        ), number
        assert torch.equal(alone[0], states[number]), number
        begin += count
