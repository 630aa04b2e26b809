"""The compiled host kernels against the torch references, on shapes that straddle tiles.

Where the library was not built or the processor lacks AVX-512 BF16, the same functions run their torch fallbacks, and
the tests hold for those, except the ones on identical bits and on attention in place, which only our own kernels promise.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quintet.executor.batch import BatchBuilder, KvShape, Rows
from quintet.executor.ops.host_library import host_library
from quintet.executor.ops.linear import pack_linear
from quintet.executor.ops.linear_on_host import pack_linear_in_tiles
from quintet.executor.ops.paged_attention import AttentionRows, InPlaceRows, paged_attention
from quintet.executor.ops.paged_attention_on_host import (
    paged_attention_on_host,
    reads_pages_in_place_on_host,
)
from quintet.executor.ops.pointwise_on_host import (
    rms_norm_on_host,
    rope_kv_write_on_host,
    silu_and_mul_on_host,
)
from quintet.executor.ops.rms_norm import rms_norm
from quintet.executor.ops.rope_kv_write import rope_kv_write
from quintet.executor.ops.silu_and_mul import silu_and_mul
from quintet.executor.slots import SlotTables

ONE_ROUNDING = 2**-7
"""Twice the rounding error of bf16: what two results differ by, relatively, if fp32 noise rounds them apart."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 191, 192, 200])
@pytest.mark.parametrize(
    ("width", "depth"), [(1, 1), (64, 32), (63, 33), (65, 128), (200, 7), (70, 2047), (70, 2051)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(rows: int, width: int, depth: int, biased: bool) -> None:
    """fp32 sums of up to 2 051 products differ by some 1e-6 of their terms' size, then one rounding to bf16 (2^-8)."""
    weight, x = noise(width, depth), noise(rows, depth, seed=1)
    bias = noise(width, seed=2) if biased else None
    expected = pack_linear(weight.float(), None if bias is None else bias.float())(x.float())
    out = pack_linear_in_tiles(weight, bias)(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-4)


def test_linear_takes_rows_apart_and_refuses_other_widths() -> None:
    layer = pack_linear_in_tiles(noise(40, 24), None)
    x = noise(9, 48, seed=1)
    assert torch.equal(layer(x[:, 8:32]), layer(x[:, 8:32].contiguous()))
    assert torch.equal(layer(x[:, ::2]), layer(x[:, ::2].contiguous()))
    if host_library() is not None:
        with pytest.raises(ValueError, match=r"\[9, 48\].*num_tokens, 24"):
            layer(x)


@pytest.mark.usefixtures("threads")
def test_linear_of_a_row_has_the_same_bits_in_every_batch() -> None:
    if host_library() is None:
        return
    layer = pack_linear_in_tiles(noise(130, 2100), noise(130, seed=2))
    x = noise(400, 2100, seed=1)
    whole = layer(x)
    for begin, end in ((0, 1), (5, 12), (190, 195), (1, 400)):
        assert torch.equal(layer(x[begin:end]), whole[begin:end])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [1, 16, 33, 128])
def test_rms_norm(width: int) -> None:
    """The scale may differ in its last fp32 bit, which may round a factor of the product the other way."""
    x, weight = noise(20, width), noise(width, seed=1)
    torch.testing.assert_close(
        rms_norm_on_host(x, weight, 1e-6), rms_norm(x, weight, 1e-6), rtol=2 * ONE_ROUNDING, atol=0
    )


def test_rms_norm_over_heads_that_lie_apart() -> None:
    x, weight = noise(5, 7, 32), noise(32, seed=1)
    out = rms_norm_on_host(x[:, 1:4], weight, 1e-6)
    torch.testing.assert_close(out, rms_norm(x[:, 1:4], weight, 1e-6), rtol=2 * ONE_ROUNDING, atol=0)
    assert torch.equal(out, rms_norm_on_host(x[:, 1:4].contiguous(), weight, 1e-6))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [1, 16, 33, 128])
def test_silu_and_mul(width: int) -> None:
    """The exponential may differ in its last fp32 bits, which may round a factor of the product the other way."""
    x = noise(20, 2 * width) * 4
    x[0] = 100.0
    x[1] = -100.0
    out = silu_and_mul_on_host(x)
    torch.testing.assert_close(out, silu_and_mul(x), rtol=2 * ONE_ROUNDING, atol=1e-30)
    assert silu_and_mul_on_host(torch.full((1, 4), torch.nan, dtype=torch.bfloat16)).isnan().all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("rotary", "head_dim"), [(2, 2), (32, 32), (40, 80), (128, 128)])
def test_rope_kv_write(rotary: int, head_dim: int) -> None:
    """The reference rounds the products with the sine, of size up to some 4, before it adds: 4 * 2^-8 at most."""
    tokens, heads, kv_heads, block_size = 19, 4, 2, 4
    qkv = noise(tokens, heads + 2 * kv_heads, head_dim)
    angles = torch.randn(tokens, 1, rotary // 2, generator=torch.Generator().manual_seed(1))
    cos, sin = (torch.cat((part, part), -1).bfloat16() for part in (angles.cos(), angles.sin()))
    rows = torch.randperm(12 * kv_heads * block_size, generator=torch.Generator().manual_seed(2))
    index = rows[: tokens * kv_heads]
    ours, theirs = (torch.zeros(2, 12, kv_heads, block_size, head_dim).bfloat16() for _ in range(2))
    queries = rope_kv_write_on_host(qkv, heads, kv_heads, cos, sin, ours, index)
    expected = rope_kv_write(qkv, heads, kv_heads, cos, sin, theirs, index)
    torch.testing.assert_close(queries, expected, rtol=ONE_ROUNDING, atol=4 * 2**-8)
    torch.testing.assert_close(ours[0], theirs[0], rtol=ONE_ROUNDING, atol=4 * 2**-8)
    assert torch.equal(ours[1], theirs[1])


def attention_case(
    starts: list[int], counts: list[int], window: int | None, block_size: int, kv_heads: int
) -> tuple[AttentionRows, ...]:
    """Scattered blocks for rows that bring ``counts`` tokens each."""
    max_len = max(start + count for start, count in zip(starts, counts, strict=True))
    tables = SlotTables(len(starts), max_len, block_size, torch.device("cpu"))
    blocks = np.random.default_rng(0).permutation(tables.block_table.size) + 1
    tables.block_table[:] = blocks.reshape(tables.block_table.shape)
    rows = Rows(
        slots=np.arange(len(starts), dtype=np.int64)[::-1].copy(),
        starts=np.array(starts),
        counts=np.array(counts),
        offsets=np.cumsum(counts) - np.array(counts),
        sampling=np.array([], np.int64),
    )
    builder = BatchBuilder(
        KvShape(kv_heads, block_size, 64), [window], kv_heads, False, torch.bfloat16, in_place=True
    )
    return builder.build(rows, tables).attention[window]


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("block_size", [4, 16, 24])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (2, 2, 16), (5, 1, 80), (2, 1, 256)])
@pytest.mark.parametrize(
    ("starts", "counts"),
    [
        ([0, 1, 14, 15, 16, 127, 128, 129, 255, 300], [1] * 10),
        ([0, 15, 120, 260, 3], [3, 1, 8, 20, 1]),
    ],
    ids=["decode", "mixed"],
)
def test_paged_attention(
    window: int | None,
    block_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    starts: list[int],
    counts: list[int],
) -> None:
    """Against the reference in fp32, rounded once to bf16 (2^-8); rows of more tokens are torch's, bit by bit."""
    if host_library() is None:
        assert not reads_pages_in_place_on_host(torch.bfloat16, heads, kv_heads, head_dim)
        return
    assert reads_pages_in_place_on_host(torch.bfloat16, heads, kv_heads, head_dim)
    groups = attention_case(starts, counts, window, block_size, kv_heads)
    num_blocks = len(starts) * (320 // block_size + 2) + 1
    kv, q = noise(2, num_blocks, kv_heads, block_size, head_dim), noise(sum(counts), heads, head_dim, seed=1)
    out = paged_attention_on_host(q, kv, groups, 0.2)
    few = next(group for group in groups if isinstance(group, InPlaceRows))
    expected = paged_attention(q.float(), kv.float(), (few,), 0.2)
    mine = slice(None) if few.tokens is None else few.tokens
    torch.testing.assert_close(out.float()[mine], expected[mine], rtol=2**-8, atol=1e-4)
    for group in groups[1:]:
        same = paged_attention(q, kv, (few, group), 0.2)
        assert torch.equal(out[group.tokens], same[group.tokens])


def test_paged_attention_on_two_threads_has_the_bits_of_one() -> None:
    groups = attention_case([7, 40, 300, 129], [1, 2, 1, 3], None, 16, 2)
    kv, q = noise(2, 200, 2, 16, 32), noise(7, 4, 32, seed=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = paged_attention_on_host(q, kv, groups, 0.2)
        torch.set_num_threads(2)
        assert torch.equal(paged_attention_on_host(q, kv, groups, 0.2), one)
    finally:
        torch.set_num_threads(before)


def test_paged_attention_of_a_token_has_the_same_bits_in_every_batch() -> None:
    if host_library() is None:
        return
    starts = [7, 40, 300, 129]
    kv, q = noise(2, 200, 2, 16, 32), noise(4, 4, 32, seed=1)
    (together,) = attention_case(starts, [1] * 4, None, 16, 2)
    whole = paged_attention_on_host(q, kv, (together,), 0.2)
    assert isinstance(together, InPlaceRows)
    for i in range(4):
        alone = InPlaceRows(
            None, together.slots[i : i + 1], together.positions[i : i + 1], together.block_table, None
        )
        assert torch.equal(paged_attention_on_host(q[i : i + 1], kv, (alone,), 0.2), whole[i : i + 1])


def test_other_dtypes_are_the_references() -> None:
    x, weight = noise(3, 8).float(), noise(8).float()
    assert torch.equal(rms_norm_on_host(x, weight, 1e-6), rms_norm(x, weight, 1e-6))
    assert torch.equal(silu_and_mul_on_host(x), silu_and_mul(x))
    assert not reads_pages_in_place_on_host(torch.float32, 4, 2, 32)
    assert not reads_pages_in_place_on_host(torch.bfloat16, 4, 2, 24)
