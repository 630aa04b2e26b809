"""Operations with a state in a device's pass: torch over rows that may be padding, as captured steps have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.executor.state_problems import Problem, conv, delta, heads, rows_of, selective

from quintet.executor.cuda.kv_memory import DeviceKv
from quintet.executor.cuda.rows import StepRows
from quintet.executor.cuda.states import DeviceStates
from quintet.executor.layers.states import StatePart
from quintet.executor.ops.causal_conv import causal_conv
from quintet.executor.ops.delta_rule import delta_rule
from quintet.executor.ops.head_scan import head_scan
from quintet.executor.ops.selective_scan import selective_scan
from quintet.wire.kv_spec import LayerKv, group_layers

OPERATIONS = type(
    "Operations",
    (),
    {each.__name__: staticmethod(each) for each in (causal_conv, selective_scan, head_scan, delta_rule)},
)
LAYER, OFFSET = 1, 64


def step_rows(slots: list[int], starts: list[int], counts: list[int], padding: int) -> StepRows:
    """The rows of a step, with rows and tokens of padding behind them."""

    def column(values: list[int], pad: int) -> torch.Tensor:
        return torch.tensor(values + [pad] * padding, dtype=torch.int32)

    num_tokens = sum(counts)
    ends = torch.cumsum(torch.tensor([0, *counts, *[0] * padding]), 0, dtype=torch.int32)
    tokens = torch.zeros(num_tokens + padding, dtype=torch.int32)
    return StepRows(
        num_rows=len(slots) + padding,
        num_tokens=num_tokens + padding,
        max_count=max(counts, default=1),
        slots=column(slots, -1),
        starts=column(starts, 0),
        counts=column(counts, 0),
        offsets=ends,
        token_ids=tokens,
        positions=tokens,
        token_rows=tokens,
        block_table=torch.zeros((4, 2), dtype=torch.int32),
        block_size=16,
    )


PROBLEMS = {
    "conv": lambda count: conv(count, torch.float32, 12, 4),
    "mamba": lambda count: selective(count, torch.float32, 12, 5),
    "mamba 2": lambda count: heads(count, torch.float32, 4, 8, 2, 6),
    "delta rule": lambda count: delta(count, torch.float32, 4, 8, 2, 6),
}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 3]])
@pytest.mark.parametrize("name", PROBLEMS)
def test_rows_of_padding_change_nothing(name: str, counts: list[int], padding: int) -> None:
    """Slots 2, 0 and 3 go from their block to the same, to another, and begin; block 0 is somebody else's."""
    problem: Problem = PROBLEMS[name](sum(counts) + padding)
    part = StatePart(index=LAYER, offset=OFFSET, shape=problem.state_shape)
    size = OFFSET + 4 * torch.Size(problem.state_shape).numel()
    spec = group_layers([LayerKv(layer, "state", state_bytes=size) for layer in range(LAYER + 1)], 16)
    kv = DeviceKv(spec, 6, torch.float32, torch.device("cpu"))
    for place in kv.places:
        place.copy_(torch.randn(7, spec.layer_bytes // 4).view(torch.uint8))
    before = kv.places[LAYER].clone()
    expected_states = part.of(before.clone(), torch.float32).clone()
    table = torch.zeros((1, 4, 2), dtype=torch.int32)
    table[0, 2], table[0, 0], table[0, 3] = (
        torch.tensor(both, dtype=torch.int32) for both in ([5, 5], [1, 4], [2, 3])
    )
    rows = replace(step_rows([2, 0, 3], [7, 4, 0], counts, padding), block_table=table)

    states_rows, states = DeviceStates(rows, kv).of(part)
    y = problem.run(OPERATIONS, states_rows, states)  # type: ignore[arg-type]

    plain = rows_of(counts, [5, 1, 2], [5, 4, 3], [False, False, True])
    real = slice(sum(counts))
    expected = problem.run(OPERATIONS, plain, expected_states, real)  # type: ignore[arg-type]
    torch.testing.assert_close(y[real], expected)
    torch.testing.assert_close(part.of(kv.places[LAYER], torch.float32), expected_states)
    assert torch.equal(kv.places[LAYER][:, :OFFSET], before[:, :OFFSET])
    assert torch.equal(states[[0, 1, 2]], part.of(before, torch.float32)[[0, 1, 2]])


def test_a_step_of_padding_alone_leaves_every_block_alone() -> None:
    """A graph is captured while requests hold blocks: the slots' tables name them, whatever row stands there."""
    problem: Problem = PROBLEMS["mamba"](2)
    part = StatePart(index=0, offset=0, shape=problem.state_shape)
    size = 4 * torch.Size(problem.state_shape).numel()
    kv = DeviceKv(
        group_layers([LayerKv(0, "state", state_bytes=size)], 16), 3, torch.float32, torch.device("cpu")
    )
    before = kv.places[0].clone()
    rows = replace(step_rows([], [], [], 2), block_table=torch.ones((1, 4, 2), dtype=torch.int32))
    problem.run(OPERATIONS, *DeviceStates(rows, kv).of(part))  # type: ignore[arg-type]
    assert torch.equal(kv.places[0][:3], before[:3])
