"""Operations against plain formulas, on shapes that straddle blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quintet.executor.batch import BatchBuilder, KvShape, Rows
from quintet.executor.memory import lazy_zeros
from quintet.executor.ops.linear import GatedActivation, linear
from quintet.executor.ops.paged_attention import MAX_FOLDED_TOKENS, paged_attention
from quintet.executor.ops.rms_norm import rms_norm
from quintet.executor.ops.rope_kv_write import rope, rope_kv_write
from quintet.executor.slots import SlotTables
from quintet.wire.codec import pack_i32
from quintet.wire.kv_spec import full_layers
from quintet.wire.step import StepPlan

CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm() -> None:
    x, weight = noise(5, 12), noise(12, seed=1)
    expected = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_linear_with_everything_fused() -> None:
    weight, bias, x = noise(12, 5), noise(12, seed=1), noise(3, 5, seed=2)
    y = x @ weight.T + bias
    gates, ups = y[:, :6], y[:, 6:]
    expected = gates / (1 + torch.exp(-gates)) * ups
    torch.testing.assert_close(linear(x, weight, bias, GatedActivation.SILU_AND_MUL), expected)
    torch.testing.assert_close(linear(x, weight, None), x @ weight.T)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rope_rotates_pairs_and_passes_the_rest(rotary_dim: int) -> None:
    x, angles = noise(3, 2, 8), noise(3, 1, rotary_dim // 2, seed=1)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    out = rope(x, cos, sin)
    half = rotary_dim // 2
    pairs = torch.complex(x[..., :half], x[..., half:rotary_dim]) * torch.polar(torch.ones(()), angles)
    torch.testing.assert_close(out[..., :rotary_dim], torch.cat((pairs.real, pairs.imag), -1))
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


BLOCK = 4
SHAPES = {
    "decode": ([0, 3, 4, 7, 8, 31, 17], [1] * 7),
    "decode-uneven": ([1, 2, 3, 90, 2, 1, 95], [1] * 7),
    "few-new": ([0, 3, 4, 7, 8, 31], [2, 3, 2, 3, 5, 2]),
    "prompts": ([0, 0, 0], [9, 12, 33]),
    "chunks": ([5, 5, 8, 31], [9, 9, 12, 33]),
    "mixed": ([0, 14, 2, 40, 0, 7], [20, 1, 1, 9, 1, 3]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("bytes_per_token", [64, 1 << 20], ids=["groups-whole", "groups-cut"])
def test_paged_attention(
    shape: str, window: int | None, heads: int, kv_heads: int, bytes_per_token: int
) -> None:
    """Scattered blocks, every grouping, with what lies beyond a row's tokens poisoned by large values."""
    starts, counts = SHAPES[shape]
    dim, max_len = 8, 100
    tables = SlotTables(16, max_len, full_layers(1, 1, 8, 4, BLOCK), CPU)
    slots = [15 - 2 * i for i in range(len(starts))]
    free = np.random.default_rng(0).permutation(np.arange(1, 200)).tolist()
    entries = [
        value
        for slot, start, count in zip(slots, starts, counts, strict=True)
        for at in range(-(-(start + count) // BLOCK))
        for value in (slot, 0, at, free.pop())
    ]
    plan = StepPlan(
        1,
        0,
        b"",
        [],
        pack_i32(entries),
        b"",
        pack_i32(slots),
        pack_i32(starts),
        pack_i32(counts),
        bytes(len(starts)),
    )
    tables.apply(plan)
    rows = Rows(plan)
    builder = BatchBuilder(
        KvShape(kv_heads, BLOCK, bytes_per_token), [(0, window)], heads, False, torch.float32
    )
    batch = builder.build(rows, tables)

    kv = torch.full((200, 2, kv_heads, BLOCK, dim), 1e4)
    keys = [
        noise(start + count, kv_heads, dim, seed=i)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    values = [noise(len(key), kv_heads, dim, seed=50 + i) for i, key in enumerate(keys)]
    for slot, start, key, value in zip(slots, starts, keys, values, strict=True):
        for position in range(start):  # what earlier steps wrote
            block = tables.block_table[0, slot, position // BLOCK]
            kv[block, 0, :, position % BLOCK] = key[position]
            kv[block, 1, :, position % BLOCK] = value[position]
    q = noise(sum(counts), heads, dim, seed=99)
    new_keys = torch.cat([key[start:] for key, start in zip(keys, starts, strict=True)])
    new_values = torch.cat([value[start:] for value, start in zip(values, starts, strict=True)])
    still = torch.ones(sum(counts), 1, dim)
    rotated = rope_kv_write(q, new_keys, new_values, still, 0 * still, kv, batch.blocks[0], batch.offsets)
    assert torch.equal(rotated, q)

    out = paged_attention(q, kv, batch.attention[0, window], 0.3)

    expected = []
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        mine = q[rows.offsets[i] : rows.offsets[i] + count]
        key = keys[i].repeat_interleave(heads // kv_heads, 1)
        value = values[i].repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", mine, key) * 0.3
        positions, at = torch.arange(len(key)), torch.arange(start, start + count)[:, None]
        hidden = positions > at
        if window is not None:
            hidden = hidden | (positions <= at - window)
        scores = scores.masked_fill(hidden, -math.inf)
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_the_shapes_cover_both_forms() -> None:
    counts = {count for _, row_counts in SHAPES.values() for count in row_counts}
    assert min(counts) < MAX_FOLDED_TOKENS < max(counts)


def test_lazy_zeros_have_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8):
        zeros = lazy_zeros((3, 5), dtype, CPU)
        assert zeros.dtype is dtype
        assert zeros.shape == (3, 5)
        assert not zeros.any()
