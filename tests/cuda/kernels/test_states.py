"""Layers with a state on a device: torch's results, the same bits in chunks and in a batch, and no effect of padding.

Tolerance: 16-bit results may round by a unit in the last place of the largest summed term (the SiLU of a convolution: of
its rounded argument as well). In fp32: the error of sums of up to 256 terms in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cuda.kernels.formats import FORMATS
from tests.executor.kernels.state_problems import SHAPES, Problem, rows_of

from quintet.executor.backends.cpu.ops.states import causal_conv, delta_rule, head_scan, selective_scan
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops import states as operations
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.kv_memory import KvMemory
from quintet.executor.models.layers.states import StatePart
from quintet.wire.kv_spec import LayerKv, group_layers

REFERENCES: Any = SimpleNamespace(
    causal_conv=causal_conv, selective_scan=selective_scan, head_scan=head_scan, delta_rule=delta_rule
)
NAMES = ("causal_conv", "selective_scan", "head_scan", "delta_rule")
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-17}
LAYER, OFFSET, NUM_BLOCKS, NUM_SLOTS = 1, 64, 6, 8
FRESH = -1
"""Stands in for the block to read: no state is stored yet."""
Pair = tuple[int, int]

formats = pytest.mark.parametrize("dtype", FORMATS)
shapes = pytest.mark.parametrize("shape", SHAPES)


class Blocks:
    """Memory of two layers' states, the second used from an offset of a few bytes, and steps over it."""

    def __init__(self, device: Device, problem: Problem) -> None:
        self.device, self.problem = device, problem
        self.problem.values = [value.to(device.torch_device) for value in problem.values]
        self.problem.arguments = {
            name: value.to(device.torch_device) if isinstance(value, torch.Tensor) else value
            for name, value in problem.arguments.items()
        }
        size = OFFSET + problem.state_dtype.itemsize * torch.Size(problem.state_shape).numel()
        layers = [LayerKv(layer, "state", state_bytes=size) for layer in range(LAYER + 1)]
        self.kv = KvMemory.reserve(group_layers(layers, 16), NUM_BLOCKS, torch.float32, device.torch_device)
        for place in self.kv.places:
            numbers = torch.randn(NUM_BLOCKS, place.shape[1] // problem.state_dtype.itemsize)
            place.copy_(numbers.to(problem.state_dtype).view(torch.uint8))
        self.part = StatePart(index=LAYER, offset=OFFSET, shape=problem.state_shape)
        self.module: Any = SimpleNamespace(
            **{name: partial(getattr(operations, name), device) for name in NAMES}
        )

    @property
    def states(self) -> torch.Tensor:
        return self.part.of(self.kv.places[LAYER], self.problem.state_dtype)

    def step(
        self, counts: Sequence[int], blocks: Sequence[Pair], first: int = 0, padding: int = 0
    ) -> torch.Tensor:
        """Compute this many of the problem's tokens of each row, from ``first`` on; rows read and write a pair of blocks."""
        table = torch.zeros((1, NUM_SLOTS, 3), dtype=torch.int32)
        slots = [NUM_SLOTS - 1 - 2 * row for row in range(len(counts))]
        for slot, (source, target) in zip(slots, blocks, strict=True):
            table[0, slot, :2] = torch.tensor([max(0, source), target], dtype=torch.int32)
        starts = [0 if source == FRESH else 7 for source, _ in blocks]
        owners = [row for row, count in enumerate(counts) for _ in range(count)]

        def column(values: Sequence[int], pad: int) -> torch.Tensor:
            return torch.tensor(
                [*values, *[pad] * padding], dtype=torch.int32, device=self.device.torch_device
            )

        ends = torch.cumsum(torch.tensor([0, *counts, *[0] * padding]), 0, dtype=torch.int32)
        rows = StepRows(
            num_rows=len(counts) + padding,
            num_tokens=sum(counts) + padding,
            max_count=max(counts, default=1),
            slots=column(slots, -1),
            starts=column(starts, 0),
            counts=column(counts, 0),
            offsets=ends.to(self.device.torch_device),
            token_ids=column(owners, 0),
            positions=column(owners, -1),
            token_rows=column(owners, -1),
            block_table=table.to(self.device.torch_device),
            block_size=16,
        )
        group, states = self.kv.of_state(self.part, self.problem.state_dtype)
        tokens = slice(first, first + sum(counts) + padding)
        return self.problem.run(self.module, rows.of_group(group), states, tokens)  # type: ignore[arg-type]


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    largest = float(expected.float().abs().max())
    torch.testing.assert_close(
        out.float(), expected.float(), rtol=2 * UNIT[dtype], atol=UNIT[dtype] * largest / 4
    )


@formats
@shapes
def test_results_equal_torch(shape: str, dtype: torch.dtype, device: Device) -> None:
    """Rows that continue in their block, in another one, or start, with padding after them; block 0 belongs to another
    request.
    """
    counts: list[int] = [9, 1, 2]
    pairs: list[Pair] = [(5, 5), (1, 4), (FRESH, 3)]
    blocks = Blocks(device, SHAPES[shape](sum(counts) + 2, dtype))
    before = [place.clone() for place in blocks.kv.places]
    expected_states = blocks.states.clone()
    plain = rows_of(counts, [5, 1, 2], [5, 4, 3], [False, False, True])
    for name in ("sources", "targets", "fresh", "offsets", "counts"):
        object.__setattr__(plain, name, getattr(plain, name).to(device.torch_device))
    expected = blocks.problem.run(REFERENCES, plain, expected_states, slice(sum(counts)))
    out = blocks.step(counts, pairs, padding=2)
    close(out[: sum(counts)], expected, dtype)
    assert not out[sum(counts) :].any(), "padding tokens get zeros"
    for block in (5, 4, 3):
        close(blocks.states[block], expected_states[block], blocks.problem.state_dtype)
    for block in (0, 1, 2):
        assert torch.equal(blocks.kv.places[LAYER][block], before[LAYER][block]), block
    assert torch.equal(blocks.kv.places[LAYER][:, :OFFSET], before[LAYER][:, :OFFSET])
    assert torch.equal(blocks.kv.places[0], before[0])


@shapes
def test_bits_do_not_depend_on_chunks_or_the_batch(shape: str, device: Device) -> None:
    num_tokens = 19
    blocks = Blocks(device, SHAPES[shape](num_tokens, torch.bfloat16))
    expected = blocks.step([num_tokens], [(FRESH, 2)])
    whole = blocks.states[2].clone()
    pieces, cuts = [], [0, 1, 9, 11, num_tokens]
    for number, (begin, end) in enumerate(pairwise(cuts)):
        source = FRESH if begin == 0 else (number - 1) % 2
        if begin == 1:  # next to a new request with the tokens that follow
            out = blocks.step([end - begin, num_tokens - end], [(source, number % 2), (FRESH, 5)], begin)
            pieces.append(out[: end - begin])
        else:
            pieces.append(blocks.step([end - begin], [(source, number % 2)], begin))
    assert torch.equal(torch.cat(pieces), expected)
    assert torch.equal(blocks.states[(len(cuts) - 2) % 2], whole)


@shapes
def test_padding_step_changes_no_block(shape: str, device: Device) -> None:
    """Graph capture runs while requests hold blocks: the slot tables name them for every padding row."""
    blocks = Blocks(device, SHAPES[shape](2, torch.float32))
    before = blocks.kv.places[LAYER].clone()
    assert not blocks.step([], [], padding=2).any()
    assert torch.equal(blocks.kv.places[LAYER], before)


def test_errors_name_the_tensor(device: Device) -> None:
    blocks = Blocks(device, SHAPES["mamba"](3, torch.float32))
    values = blocks.problem.values
    values[1] = values[1].half()
    with pytest.raises(ValueError, match=r"^dt: expected torch.float32\[3, 100\].*float16"):
        blocks.step([3], [(FRESH, 1)])
