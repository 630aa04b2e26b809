"""Operations against plain formulas, on shapes that straddle blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.executor.kernels.paged_requests import Features, reference

from quintet.executor import batch as batches
from quintet.executor.backends.cpu.ops.activation import clipped
from quintet.executor.backends.cpu.ops.experts import Gate, gated
from quintet.executor.backends.cpu.ops.linear import GatedActivation, linear
from quintet.executor.backends.cpu.ops.paged_attention import MAX_FOLDED_TOKENS, paged_attention
from quintet.executor.backends.cpu.ops.rms_norm import rms_norm
from quintet.executor.backends.cpu.ops.rope_kv_write import rope, rope_kv_write, temperatures
from quintet.executor.batch import BatchBuilder
from quintet.executor.memory import lazy_zeros
from quintet.executor.model_config.spec import Temperature
from quintet.executor.models.layers.attention import AttentionLayer, AttentionWindow
from quintet.executor.slots import Rows, SlotTables
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


def test_linear_with_fused_bias_and_activation() -> None:
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


def test_attention_temperature_rises_once_a_period() -> None:
    factors = temperatures(Temperature(0.5, 10, 1), torch.tensor([0, 8, 9, 18, 19, 999]))
    torch.testing.assert_close(factors, 1 + 0.5 * torch.log(torch.tensor([1.0, 1, 2, 2, 3, 101])))


def test_attention_temperature_rises_continuously() -> None:
    """Expect log base 64 of the number of visible tokens, from 64 on."""
    factors = temperatures(
        Temperature(1 / math.log(64), 64, -63, whole=False), torch.tensor([0, 63, 64, 4095])
    )
    torch.testing.assert_close(factors, torch.tensor([1.0, 1.0, math.log(65, 64), 2.0]))


@pytest.mark.parametrize("first", [0, 3])
def test_rope_rotates_adjacent_pairs(first: int) -> None:
    x, angles = noise(3, 2, 10), noise(3, 1, 3, seed=1)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    out = rope(x, cos, sin, first, interleaved=True)
    rotating = x[..., first : first + 6].contiguous().unflatten(-1, (3, 2))
    pairs = torch.view_as_complex(rotating) * torch.polar(torch.ones(()), angles)
    torch.testing.assert_close(out[..., first : first + 6], torch.view_as_real(pairs).flatten(-2))
    assert torch.equal(out[..., :first], x[..., :first])
    assert torch.equal(out[..., first + 6 :], x[..., first + 6 :])


def test_clamp_bounds_may_exceed_the_dtype() -> None:
    """Torch rejects a bound that fp16 cannot represent. A value that overflows there exceeds it in any case."""
    x = torch.tensor([-math.inf, -3.0, 5.0, math.inf]).half()
    assert clipped(x, -1e6, 4.0).tolist() == [-math.inf, -3.0, 4.0, 4.0]


def test_gate_limits_may_exceed_the_dtype() -> None:
    gate = Gate(activation=GatedActivation.CLAMPED_SWIGLU, factor=1.0, limit=1e6)
    found = gated(torch.tensor([[2.0, 3.0]]).half(), gate)
    torch.testing.assert_close(found.float(), 8 * torch.sigmoid(torch.tensor([[2.0]])), atol=0.01, rtol=0)


BLOCK = 4
SHAPES = {
    "decode": ([0, 3, 4, 7, 8, 31, 17], [1] * 7),
    "decode-uneven": ([1, 2, 3, 90, 2, 1, 95], [1] * 7),
    "few-new": ([0, 3, 4, 7, 8, 31], [2, 3, 2, 3, 5, 2]),
    "prompts": ([0, 0, 0], [9, 12, 33]),
    "chunks": ([5, 5, 8, 31], [9, 9, 12, 33]),
    "mixed": ([0, 14, 2, 40, 0, 7], [20, 1, 1, 9, 1, 3]),
}


WINDOWS = {
    "all": AttentionWindow(),
    "window of one": AttentionWindow(1),
    "window": AttentionWindow(6),
    "chunk of one": AttentionWindow(None, 1),
    "chunk": AttentionWindow(None, 7),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "values wider": {"value_dim": 12},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": noise(12, seed=7).abs()},
    "sinks": {"sinks": noise(12, seed=8)},
    "all": {
        "softcap": 2.0,
        "alibi_slopes": noise(12, seed=7).abs(),
        "sinks": noise(12, seed=8),
        "value_dim": 4,
    },
}


def layer_of(heads: int, kv_heads: int, window: AttentionWindow, more: dict[str, Any]) -> AttentionLayer:
    of_heads = {name: x[:heads] for name, x in more.items() if isinstance(x, torch.Tensor)}
    return AttentionLayer(
        index=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        scale=0.3,
        window=window.window,
        chunk=window.chunk,
        **(more | of_heads),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    "gathered_bytes", [batches.GATHER_BYTES, 1 << 10], ids=["groups-whole", "groups-cut"]
)
@pytest.mark.parametrize("more", OPTIONS.values(), ids=OPTIONS.keys())
def test_paged_attention(
    shape: str,
    window: AttentionWindow,
    heads: int,
    kv_heads: int,
    gathered_bytes: int,
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scattered blocks, every grouping, large values beyond each row's tokens."""
    monkeypatch.setattr(batches, "GATHER_BYTES", gathered_bytes)
    layer = layer_of(heads, kv_heads, window, more)
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
    builder = BatchBuilder(BLOCK, [(0, window, layer.heads)], False, torch.float32)
    batch = builder.build(rows, tables)

    cache = [torch.full((200, kv_heads, BLOCK, width), 1e4) for width in (dim, layer.value_width)]
    keys = [
        noise(start + count, kv_heads, dim, seed=i)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    values = [noise(len(key), kv_heads, layer.value_width, seed=50 + i) for i, key in enumerate(keys)]
    for slot, start, *new in zip(slots, starts, keys, values, strict=True):
        for position in range(start):  # written by earlier steps
            block = tables.block_table[0, slot, position // BLOCK]
            for plane, numbers in zip(cache, new, strict=True):
                plane[block, :, position % BLOCK] = numbers[position]
    q = noise(sum(counts), heads, dim, seed=99)
    new_keys = torch.cat([key[start:] for key, start in zip(keys, starts, strict=True)])
    new_values = torch.cat([value[start:] for value, start in zip(values, starts, strict=True)])
    rotated = rope_kv_write(
        layer, q, new_keys, new_values, None, batch.positions, *cache, batch.blocks[0], batch.offsets
    )
    assert torch.equal(rotated, q)

    out = paged_attention(layer, q, *cache, batch.attention[0, window, layer.heads])

    expected = []
    features = Features(window.window, layer.softcap, layer.alibi_slopes, window.chunk, layer.sinks)
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        mine = noise(start + count, heads, dim, seed=99)  # arbitrary for earlier tokens
        mine[start:] = q[rows.offsets[i] : rows.offsets[i] + count]
        whole, _ = reference(mine.double(), keys[i].double(), values[i].double(), 0.3, features)
        expected.append(whole[start:].view(count, heads, -1).float())
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


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 100_000), (0, 4)])
def test_lazy_zeros_are_cache_line_aligned(shape: tuple[int, ...]) -> None:
    zeros = lazy_zeros(shape, torch.float32, CPU)
    assert zeros.data_ptr() % 64 == 0 and zeros.shape == shape and zeros.is_contiguous()
