"""Attention over the paged cache against its reference, on shapes that straddle tiles, query tiles, splits and blocks."""

from __future__ import annotations

import pytest
import torch
from tests.cuda.kernels.attention_problem import FP8, Problem, Row, Shape

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention import AttentionPlan, paged_attention
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.models.layers.attention import AttentionWindow

LENGTHS = [1, 15, 16, 17, 63, 64, 65, 300]
ALONE: list[Row] = [(length - 1, 1) for length in LENGTHS]
MIXED: list[Row] = [(64, 1), (0, 0), (0, 70), (10, 3), (130, 40), (199, 1), (0, 0)]
MIXED_LENGTHS = [start + count for start, count in MIXED]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "block_size"),
    [(2, 2, 16), (4, 2, 32), (4, 1, 64), (7, 1, 16), (16, 2, 48), (32, 1, 16)],
)
def test_one_new_token_per_row(device: Device, num_heads: int, num_kv_heads: int, block_size: int) -> None:
    shape = Shape(num_heads, num_kv_heads, block_size=block_size)
    Problem(device, shape, LENGTHS).run(ALONE).check()


def test_blocks_of_the_size_of_a_state(device: Device) -> None:
    shape = Shape(block_size=1040, max_model_len=4096)
    rows: list[Row] = [(1100, 1), (1030, 12), (1039, 1), (1040, 1)]
    Problem(device, shape, [start + count for start, count in rows]).run(rows).check()
    assert not Shape(block_size=1040, max_model_len=1 << 22).plan(device).supports_block_size(1040)


@pytest.mark.parametrize("block_size", [2, 3, 16, 48, 1040, 2080, 4096, 65520])
def test_block_index_without_division(block_size: int) -> None:
    """With the arithmetic of csrc/cuda/attention.cuh, for all positions that a plan allows."""
    inverse = 0xFFFFFFFF // block_size + 1
    borders = range(0, (1 << 32) // block_size, max(1, (1 << 32) // block_size**2 // 1000) * block_size)
    for position in (at for border in borders for at in (max(0, border - 1), border)):
        assert position * inverse >> 32 == position // block_size


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_head_width_and_format(
    device: Device, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None
) -> None:
    shape = Shape(2, 1, head_dim, dtype=dtype, kv_dtype=kv_dtype)
    rows: list[Row] = [(40, 1), (20, 50)]
    Problem(device, shape, [41, 70]).run(rows, value_scale=1.0 if kv_dtype is None else 0.3).check()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1), (7, 1)])
def test_decode_chunks_and_padding_in_one_step(device: Device, num_heads: int, num_kv_heads: int) -> None:
    step = Problem(device, Shape(num_heads, num_kv_heads), MIXED_LENGTHS).run(MIXED, padding=3)
    step.check()
    assert not step.out[-3:].any(), "padding tokens get zeros"


@pytest.mark.parametrize("window", [1, 16, 65, 128])
def test_sliding_window(device: Device, window: int) -> None:
    problem = Problem(device, Shape(windows=(None, window)), MIXED_LENGTHS)
    problem.run(MIXED, window=window).check()


def test_blocks_before_the_window_may_be_freed(device: Device) -> None:
    """Blocks before every token's window were freed: their entries of the block table may name any block."""
    shape = Shape(windows=(16,))
    problem = Problem(device, shape, [300, 200])
    problem._tables[0, : (299 - 16) // 16] = -(1 << 20)
    problem._tables[1, : (150 - 16) // 16] = -(1 << 20)
    for rows in ([(299, 1), (150, 50)],):
        step = problem.run(rows, window=16)
        assert not step.out.isnan().any()


@pytest.mark.parametrize("rows", [ALONE, MIXED])
def test_soft_cap(device: Device, rows: list[Row]) -> None:
    Problem(device, Shape(), [start + count for start, count in rows]).run(rows, soft_cap=1.5).check()


@pytest.mark.parametrize("rows", [ALONE, MIXED])
def test_alibi_with_a_window_and_a_cap(device: Device, rows: list[Row]) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device.torch_device)
    problem = Problem(device, Shape(windows=(100,)), [start + count for start, count in rows])
    problem.run(rows, window=100, soft_cap=2.0, alibi=slopes).check()


@pytest.mark.parametrize("chunk", [1, 16, 65, 128])
def test_chunks(device: Device, chunk: int) -> None:
    problem = Problem(device, Shape(chunks=(chunk,)), MIXED_LENGTHS)
    problem.run(MIXED, chunk=chunk).check()


@pytest.mark.parametrize("rows", [ALONE, MIXED, [(699, 1), (400, 100)]], ids=["alone", "mixed", "split"])
@pytest.mark.parametrize("fixed_splits", [False, True])
def test_sinks(device: Device, rows: list[Row], fixed_splits: bool) -> None:
    sinks = torch.tensor([3.0, -2.0, 40.0, -200.0], device=device.torch_device)
    shape = Shape(windows=(None, 100), chunks=(128,))
    problem = Problem(device, shape, [start + count for start, count in rows])
    plan = shape.plan(device, fixed_splits=fixed_splits)
    problem.run(rows, plan=plan, sinks=sinks).check()
    problem.run(rows, plan=plan, sinks=sinks, window=100, soft_cap=2.0).check()
    problem.run(rows, plan=plan, sinks=sinks, chunk=128).check()


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 32), (40, 24), (576, 512), (192, 128)])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, None), (torch.float32, None), (torch.float16, FP8)]
)
def test_values_of_another_width(
    device: Device, head_dim: int, value_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    shape = Shape(4, 2, head_dim, dtype=dtype, kv_dtype=kv_dtype, chunks=(50,), value_dim=value_dim)
    rows: list[Row] = [(39, 1), (0, 3), (52, 12), (0, 0)]
    sinks = torch.tensor([3.0, -2.0, 0.0, 1.0], device=device.torch_device)
    problem = Problem(device, shape, [40, 3, 64, 0])
    problem.run(rows, padding=1, value_scale=1.0 if kv_dtype is None else 0.3).check()
    problem.run(rows, chunk=50, sinks=sinks).check()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim"),
    [
        (torch.float32, None, 64),
        (torch.float32, FP8, 40),
        (torch.float32, None, 320),
        (torch.bfloat16, None, 36),
        (torch.float16, FP8, 72),
        (torch.bfloat16, FP8, 264),
    ],
)
def test_formats_and_widths_without_matrix_kernels(
    device: Device, dtype: torch.dtype, kv_dtype: torch.dtype | None, head_dim: int
) -> None:
    shape = Shape(2, 1, head_dim, dtype=dtype, kv_dtype=kv_dtype, windows=(None, 50))
    rows: list[Row] = [(129, 1), (0, 3), (120, 12), (0, 0)]
    problem = Problem(device, shape, [130, 3, 132, 0])
    plan = shape.plan(device)
    assert plan.matrix is None
    problem.run(rows, plan=plan, padding=1).check()
    problem.run(rows, plan=plan, window=50, soft_cap=2.0).check()


def test_few_long_rows_are_split(device: Device) -> None:
    shape = Shape()
    plan = shape.plan(device)
    step = Problem(device, shape, [700, 3, 500]).run([(699, 1), (2, 1), (400, 100)], plan=plan)
    step.check()
    decode, chunk = _parts(plan, None, 3)
    assert decode[0] > 1
    assert decode[1:] == [1, 1]
    assert chunk[2] > 1


@pytest.mark.parametrize("rows", [ALONE, [(699, 1), (400, 100)]])
def test_plan_is_reused_by_layers(device: Device, rows: list[Row]) -> None:
    """The plan of a step is made once; its work counters reset for each layer."""
    shape = Shape(num_heads=8, num_kv_heads=4)
    problem = Problem(device, shape, [start + count for start, count in rows])
    plan = shape.plan(device)
    step = problem.run(rows, plan=plan)
    again = paged_attention(device, plan, step.q, step.kv, step.rows, step.options[0])
    assert torch.equal(step.out, again)


def test_many_rows_are_planned(device: Device) -> None:
    """More rows than a block of the plan has threads: prefix sums continue over several rounds."""
    num_rows = 1100
    plan = AttentionPlan(
        device, num_rows, num_rows, 8, 2, 64, 1024, torch.bfloat16, torch.bfloat16, fixed_splits=True
    )
    starts = torch.arange(num_rows, dtype=torch.int32) % 1000
    counts = (torch.arange(num_rows, dtype=torch.int32) % 7 != 0).int()  # every seventh is padding
    empty = torch.empty(0, dtype=torch.int32)
    columns = (x.to(device.torch_device) for x in (starts, counts))
    plan.prepare(StepRows(num_rows, num_rows, 1, empty, *columns, empty, empty, empty, empty, empty, 16))
    table = plan.table(AttentionWindow(), False).cpu()
    parts = table[4 + num_rows + 1 :][:num_rows]
    assert bool((parts[counts == 1] <= starts[counts == 1] // 256 + 1).all())
    items = torch.where(counts == 1, 2 * parts, 0)
    assert table[4 : 4 + num_rows + 1].tolist() == [0, *items.cumsum(0).tolist()]
    assert int(table[1]) == int(items.sum())
    stored = torch.where(parts > 1, items, 0)
    bases = table[4 + 2 * num_rows + 1 :][:num_rows]
    assert torch.equal(bases, stored.cumsum(0) - stored)
    assert plan.matrix is not None and int(stored.sum()) <= len(plan.matrix.decode.sums)


def test_errors_name_the_tensor(device: Device) -> None:
    shape = Shape()
    problem = Problem(device, shape, [5])
    plan = shape.plan(device)
    step = problem.run([(4, 1)], plan=plan)
    scale = step.options[0]

    def call(**changed: object) -> None:
        given = {"q": step.q, "kv": step.kv, "scale": scale, "window": None, **changed}
        paged_attention(device, plan, rows=step.rows, **given)  # type: ignore[arg-type]

    call()
    with pytest.raises(ValueError, match=r"^q: expected torch.bfloat16\[1, 4, 64\].*float16"):
        call(q=step.q.half())
    with pytest.raises(ValueError, match=r"^keys: expected torch.bfloat16.*contiguous blocks"):
        call(kv=step.kv.transpose(2, 3))
    with pytest.raises(ValueError, match=r"window=7.* is not a window of the plan"):
        call(window=7)
    with pytest.raises(ValueError, match=r"scale is 0\.0; expected a positive"):
        call(scale=0.0)
    with pytest.raises(ValueError, match=r"^alibi: expected"):
        call(alibi=torch.zeros(3, device=device.torch_device))
    with pytest.raises(ValueError, match=r"^out: expected"):
        call(out=torch.zeros_like(step.out, dtype=torch.float32))


def _parts(plan: AttentionPlan, window: int | None, num_rows: int) -> tuple[list[int], list[int]]:
    """Return the number of work items per query tile and KV head of each row, by kernel."""
    first = 4 + plan.max_rows + 1
    decode, chunk = (
        plan.table(AttentionWindow(window), for_chunks)[first : first + num_rows].tolist()
        for for_chunks in (False, True)
    )
    return decode, chunk
