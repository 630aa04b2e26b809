"""Attention with fixed splits: a token has the same bits alone, in a chunk, with its whole prompt and in any batch.

Splits are computed in parallel or in sequence. The tests compare for equality.
"""

from __future__ import annotations

import pytest
import torch
from tests.cuda.kernels.attention_problem import FP8, Problem, Row, Shape

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan, fixed_split_size

LENGTH = 600
"""Three splits of 256 positions."""
TOKENS = [0, 15, 63, 64, 255, 256, 300, 511, 512, 599]


def test_split_sizes() -> None:
    assert [fixed_split_size(length) for length in (1, 8192, 8193, 32768, 131072)] == [
        256,
        256,
        512,
        1024,
        4096,
    ]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("shape", "soft_cap", "with_alibi"),
    [
        (Shape(2, 1), 0.0, False),
        (Shape(2, 2, dtype=torch.float16), 0.0, False),
        (Shape(4, 1, kv_dtype=FP8), 2.0, True),
        (Shape(2, 1, windows=(100,)), 0.0, False),
        (Shape(1, 1, 256), 0.0, False),
        (Shape(2, 1, dtype=torch.float32), 0.0, False),
    ],
)
def test_bits_do_not_depend_on_chunks(
    device: Device, shape: Shape, soft_cap: float, with_alibi: bool
) -> None:
    problem = Problem(device, shape, [LENGTH, 40])
    plan = shape.plan(device, fixed_splits=True)
    alibi = torch.full((shape.num_heads,), 0.03, device=device.torch_device) if with_alibi else None

    def run(rows: list[Row], requests: list[int]) -> torch.Tensor:
        window = shape.windows[0]
        return problem.run(rows, requests, plan=plan, window=window, soft_cap=soft_cap, alibi=alibi).out

    whole = run([(0, LENGTH)], [0])
    for cut in (250, 257):
        beside = run([(3, 5), (0, cut)], [1, 0])[5:]
        chunk = run([(cut, LENGTH - cut)], [0])
        assert torch.equal(torch.cat([beside, chunk]), whole), cut
    for token in TOKENS:
        alone = run([(token, 1)], [0])
        assert torch.equal(alone[0], whole[token]), token
    together = run([(token, 1) for token in TOKENS], [0] * len(TOKENS))
    assert torch.equal(together, whole[TOKENS])


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("num_heads", "ranks"), [(65, 5), (80, 5), (128, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.whole)])
def test_bits_do_not_depend_on_the_heads_of_a_rank(
    device: Device, num_heads: int, ranks: int, dtype: torch.dtype
) -> None:
    """All heads read one KV head, and exceed the number multiplied at once; each of several ranks has some of them."""
    problem = Problem(device, Shape(num_heads, 1, dtype=dtype), [300, 40])
    whole_plan, each = problem.shape.plan(device, fixed_splits=True), num_heads // ranks
    for rows in ([(299, 1)], [(260, 40), (3, 5)], [(0, 70), (39, 1)]):
        whole = problem.run(rows, plan=whole_plan).out
        for rank in {0, ranks // 2, ranks - 1}:
            begin, end = rank * each, (rank + 1) * each
            part = problem.of_heads(begin, end)
            own = part.run(rows, plan=part.shape.plan(device, fixed_splits=True)).out
            assert torch.equal(own, whole[:, begin:end]), (rows, rank)


@pytest.mark.parametrize("rows", [[(LENGTH - 1, 1)], [(LENGTH - 20, 20)]])
def test_bits_do_not_depend_on_parallel_splits(device: Device, rows: list[Row]) -> None:
    shape = Shape(2, 1)
    problem = Problem(device, shape, [LENGTH])
    spread, confined = shape.plan(device, fixed_splits=True), shape.plan(device, fixed_splits=True)
    assert confined.matrix is not None
    confined.matrix.decode.num_query_tiles = confined.matrix.chunk.num_query_tiles = 0
    outputs = [problem.run(rows, plan=plan).out for plan in (spread, confined)]
    assert max(_parts(spread)) > 1
    assert max(_parts(confined)) == 1
    assert torch.equal(*outputs)


def _parts(plan: AttentionPlan) -> list[int]:
    """Return the work items of the only row, by kernel."""
    return plan.tables[0, :, 4 + plan.max_rows + 1].tolist()  # type: ignore[no-any-return]
