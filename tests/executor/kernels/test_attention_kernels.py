"""Attention over the paged cache and the write to it, against fp64 and with the same bits in every batch.

Bounds. The result is rounded once: bf16 2^-8, fp16 2^-11; for fp32 it is a sum of up to a thousand products in order. Where
bf16 is multiplied in pairs, weights and their sum are rounded as well (2^-8 of each): the average is off by at most twice
that share of the values' average magnitude. A matrix unit also rounds them, from powers of two that are off by 9e-5, a
fortieth of that; of an int8 cache with their scales, and not their sum. A cache of fewer bits is compared with its rounded
contents; int4 on a matrix unit is also rounded to bf16.

The cache is full of NaN at first, so that reads outside a request are detected.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.executor.kernels.instruction_sets import MATRIX_UNITS, REPEATING, isa
from tests.executor.kernels.paged_requests import PLAIN, Features, Requests, Row, Shape, noise, reference

from quintet.deploy.config.memory import ATTENTION_SCRATCH_BYTES
from quintet.executor.backends.cpu.ops.host_attention import PagedKv, attend, kv_block_bytes, write_kv
from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.backends.cpu.ops.rope_kv_write import rope, temperatures
from quintet.executor.backends.cpu.program.step import CRotation, CStep
from quintet.executor.model_config.spec import NormKind, Temperature
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.norm import Norm
from quintet.wire.errors import ConfigError

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

BF16, FP16, FP32, INT8, INT4 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.quint4x2
FP8 = torch.float8_e4m3fn
DTYPES = [BF16, FP16, FP32]
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-17}
"""Relative to the values' average magnitude; see above."""

EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000]
"""Lengths around the ends of tiles, chunks and partitions."""

dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dataclass(frozen=True)
class Format:
    """Dtypes of rows and cache."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    in_pairs: bool = False
    """Multiply bf16 in pairs, if the processor can."""

    @property
    def rounds_weights(self) -> bool:
        """Return whether weights are rounded to bf16."""
        return self.in_pairs or (self.dtype is BF16 and isa() in MATRIX_UNITS)

    def shape(
        self,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        value_dim: int | None = None,
    ) -> Shape:
        return Shape(self.dtype, heads, kv_heads, head_dim, block_size, self.kv_dtype, value_dim)


FORMATS = {
    "bf16": Format(BF16, BF16),
    "bf16 in pairs": Format(BF16, BF16, True),
    "fp16": Format(FP16, FP16),
    "fp32": Format(FP32, FP32),
    "int8 of bf16": Format(BF16, INT8),
    "int8 of fp32": Format(FP32, INT8),
    "int4 of bf16": Format(BF16, INT4),
    "int4 of fp32": Format(FP32, INT4),
    "fp8 of bf16": Format(BF16, FP8),
    "fp8 of fp16": Format(FP16, FP8),
    "fp8 of fp32": Format(FP32, FP8),
}


@pytest.fixture(params=FORMATS.values(), ids=FORMATS.keys())
def form(request: pytest.FixtureRequest) -> Iterator[Format]:
    """Run in each format."""
    library = open_library()
    assert library is not None
    library.qt_attend_in_pairs(int(request.param.in_pairs))
    yield request.param
    library.qt_attend_in_pairs(-1)


@pytest.fixture(autouse=True, params=[2] if REPEATING in os.environ else [1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this number of threads."""
    library = open_library()
    assert library is not None
    library.qt_set_threads(request.param, 0)
    yield request.param
    library.qt_set_threads(1, 0)


def check(form: Format, out: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """``size``: average magnitude of the averaged values."""
    # 1.05: fp32 noise before the rounding. Numbers below the smallest normal one are rounded like that one.
    of_formats = (size + torch.finfo(out.dtype).smallest_normal) * UNIT[out.dtype]
    bound = of_formats * (3 if form.rounds_weights else 1.05)
    error = (out.double() - expected).abs()
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    integers = torch.int32 if a.dtype is torch.float32 else torch.int16
    assert torch.equal(a.view(integers), b.view(integers))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [
        *((4, 2, 64, 64), (7, 1, 80, 80), (3, 3, 16, 16), (5, 1, 112, 112), (96, 1, 32, 32), (40, 1, 48, 48)),
        *((4, 2, 256, 256), (4, 2, 72, 72), (71, 1, 64, 64), (3, 1, 100, 100), (2, 2, 13, 5)),
        *((6, 2, 48, 96), (4, 4, 192, 128), (16, 1, 576, 512), (128, 1, 40, 24), (2, 1, 264, 300)),
    ],
)
@pytest.mark.parametrize("block_size", [16, 48])
def test_attention_equals_the_reference(
    form: Format, heads: int, kv_heads: int, head_dim: int, value_dim: int, block_size: int
) -> None:
    shape = form.shape(heads, kv_heads, head_dim, block_size, value_dim)
    lengths, scale = EDGES[:-4] if heads > 7 else EDGES, head_dim**-0.5
    requests = Requests(shape, lengths)
    rows: list[Row] = [(i, 0, length) for i, length in enumerate(lengths)]
    for i, out in enumerate(requests.run(rows, scale)):
        check(form, out, *reference(*requests.parts(i), scale, PLAIN))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [(16, 1, 576, 512), (4, 2, 40, 24), (70, 1, 48, 48), (3, 3, 20, 3)],
)
def test_values_as_prefix_of_the_keys(
    form: Format, heads: int, kv_heads: int, head_dim: int, value_dim: int
) -> None:
    """Values stored as a prefix of the keys have the bits of separate values, except int8 and fp8 with the keys' scale."""
    lengths, scale = EDGES[:-4] if heads > 7 else EDGES, head_dim**-0.5
    shape = replace(form.shape(heads, kv_heads, head_dim, 16, value_dim), values_in_keys=True)
    if form.kv_dtype is INT4:
        with pytest.raises(ConfigError, match=r"prefix of the keys .MLA.; use int8"):
            Requests(shape, lengths)
        return
    once, twice = Requests(shape, lengths), Requests(replace(shape, values_in_keys=False), lengths)
    assert once.kv.memory.shape[1] <= twice.kv.memory.shape[1] * (head_dim + 15) / (head_dim + value_dim)
    for i, numbers in enumerate(twice.qkv):
        keys = numbers[:, heads * head_dim : (heads + kv_heads) * head_dim].unflatten(1, (kv_heads, -1))
        numbers[:, (heads + kv_heads) * head_dim :] = keys[..., :value_dim].flatten(1)
        once.qkv[i][:, (heads + kv_heads) * head_dim :] = torch.nan  # not read
    whole: list[Row] = [(i, 0, length) for i, length in enumerate(lengths)]
    pieces: list[list[Row]] = [
        [(i, start, min(length, start + 37) - start) for i, length in enumerate(lengths) if start < length]
        for start in range(0, max(lengths), 37)
    ]
    outputs = once.run(whole, scale)
    for i, out in enumerate(outputs):
        check(form, out, *reference(*once.parts(i), scale, PLAIN))
    if form.kv_dtype not in (INT8, FP8):
        for out, other in zip(outputs, twice.run(whole, scale), strict=True):
            assert_same_bits(out, other)
    once.kv.memory.fill_(0xFF)
    parts: list[list[torch.Tensor]] = [[] for _ in lengths]
    for rows in pieces:
        for (i, _, _), out in zip(rows, once.run(rows, scale), strict=True):
            parts[i].append(out)
    for out, part in zip(outputs, parts, strict=True):
        assert_same_bits(out, torch.cat(part))


FEATURES = {
    "window": Features(window=70),
    "window of one": Features(window=1),
    "window of a partition": Features(window=512),
    "softcap": Features(softcap=3.0),
    "alibi": Features(alibi_slopes=torch.tensor([0.5, 0.25, 0.03, 0.004])),
    "chunk": Features(chunk=100),
    "chunk of a partition": Features(chunk=512),
    "chunk of one": Features(chunk=1),
    "sinks": Features(sinks=torch.tensor([3.0, -2.0, 40.0, -200.0])),
    "sinks in a window": Features(window=5, sinks=torch.tensor([1.0, 0.0, 4.0, -9.0])),
    "chunk, cap and sinks": Features(chunk=130, softcap=2.0, sinks=torch.tensor([1.0, 0.0, 4.0, -9.0])),
    "all": Features(window=200, softcap=2.0, alibi_slopes=torch.tensor([0.5, 0.25, 0.03, 0.004])),
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES.keys())
def test_features(form: Format, features: Features) -> None:
    requests = Requests(form.shape(), EDGES)
    rows = [(i, 0, length) for i, length in enumerate(EDGES)]
    for i, out in enumerate(requests.run(rows, 0.3, features)):
        check(form, out, *reference(*requests.parts(i), 0.3, features))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("visible", [{}, {"window": 33}, {"chunk": 48}], ids=["all", "window", "chunk"])
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("sunken", [False, True])
@pytest.mark.parametrize("widths", [(64, 64), (24, 40), (100, 64)])
def test_features_together(
    form: Format,
    softcap: float | None,
    visible: dict[str, int],
    sloped: bool,
    sunken: bool,
    widths: tuple[int, int],
) -> None:
    slopes, sinks = noise(6, seed=1).abs() * 0.1, noise(6, seed=2) * 3
    features = Features(
        **visible,
        softcap=softcap,
        alibi_slopes=slopes if sloped else None,
        sinks=sinks if sunken else None,
    )
    requests = Requests(form.shape(6, 2, widths[0], 16, widths[1]), [1, 40, 200])
    rows: list[Row] = [(0, 0, 1), (1, 0, 40), (2, 0, 200)]
    together = requests.run(rows, 0.3, features)
    for i, out in enumerate(together):
        check(form, out, *reference(*requests.parts(i), 0.3, features))
    assert_same_bits(requests.run([(2, 170, 30)], 0.3, features)[0], together[2][170:])


CHUNKINGS = {
    "one by one": [1] * 530,
    "at once": [530],
    "within tiles": [3, 1, 7, 2, 4, 5, 9, 499],
    "at ends of tiles": [16, 48, 64, 384, 18],
    "around ends": [127, 2, 382, 2, 17],
}


def cut(requests: Requests, counts: list[int], features: Features = PLAIN) -> torch.Tensor:
    """Compute the only request in chunks of these sizes."""
    starts = np.cumsum(counts) - counts
    chunks = [
        requests.run([(0, int(start), count)], 0.2, features)[0]
        for start, count in zip(starts, counts, strict=True)
    ]
    return torch.cat(chunks)


@pytest.mark.parametrize(
    "features",
    [PLAIN, Features(window=100), Features(chunk=100, sinks=torch.arange(6.0))],
    ids=["plain", "window", "chunk with sinks"],
)
@pytest.mark.parametrize("widths", [(48, 48), (72, 36)])
def test_a_prompt_has_the_same_bits_in_any_chunks(
    form: Format, features: Features, widths: tuple[int, int]
) -> None:
    shape = form.shape(6, 2, widths[0], 16, widths[1])
    outs = [cut(Requests(shape, [530]), counts, features) for counts in CHUNKINGS.values()]
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


def test_denormal_sums_have_the_same_bits_in_any_chunks(form: Format) -> None:
    """bf16 instructions flush such sums, vector instructions do not; unseen keys must change neither."""
    outs = []
    for counts in ([300], [1] * 20 + [100, 9, 171]):
        requests = Requests(form.shape(6, 2, 48), [300])
        tiny = requests.qkv[0].float()
        tiny[:, 8 * 48 :] *= 2.0 ** (-129 if form.dtype is FP32 else -124)  # the values
        requests.qkv[0] = tiny.to(form.dtype)
        outs.append(cut(requests, counts))
    assert_same_bits(*outs)


@pytest.mark.parametrize("threads", [1], indirect=True)  # one thread computes this request and the one before
@pytest.mark.parametrize("features", [PLAIN, Features(window=17)], ids=["plain", "window"])
def test_infinities_do_not_affect_other_requests(form: Format, features: Features) -> None:
    """A thread's leftover values lie in tiles that the next request lacks, or no longer visible."""
    requests = Requests(form.shape(), [128, 16, 48])
    rows: list[Row] = [(1, 0, 16), (2, 0, 48), (2, 47, 1)]
    expected = [requests.run([row], features=features)[0] for row in rows]
    assert not any(out.isnan().any() for out in expected)
    requests.qkv[0][:, -2 * 64 :] = torch.inf  # the values
    for row, out in zip(rows, expected, strict=True):
        requests.run([(0, 0, 128)], features=features)
        assert_same_bits(requests.run([row], features=features)[0], out)


@pytest.mark.parametrize(
    "features",
    [PLAIN, Features(window=100, softcap=2.0), Features(chunk=64, sinks=torch.arange(7.0))],
    ids=["plain", "window", "chunk with sinks"],
)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(form: Format, features: Features) -> None:
    lengths = [1 + 37 * i % 700 for i in range(63)] + [1400]
    shape = form.shape(7, 1, 64, 32)
    together, alone = Requests(shape, lengths), Requests(shape, lengths)
    before: list[Row] = [(i, 0, length - 1) for i, length in enumerate(lengths) if length > 1]
    together.run(before, 0.2, features)
    for row in before:
        alone.run([row], 0.2, features)
    last: list[Row] = [(i, length - 1, 1) for i, length in enumerate(lengths)]
    expected = [alone.run([row], 0.2, features)[0] for row in last]
    for size in (2, 5, 64):
        outs = [out for at in range(0, 64, size) for out in together.run(last[at : at + size], 0.2, features)]
        for out, one in zip(outs, expected, strict=True):
            assert_same_bits(out, one)
    mixed = [*last[:10], (63, 1000, 400), *last[11:20]]
    for out, row in zip(together.run(mixed, 0.2, features), mixed, strict=True):
        assert_same_bits(out[-1:], expected[row[0]])


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_threads_change_no_bits(form: Format) -> None:
    """Long and short rows, so that several threads share a row."""
    library = open_library()
    assert library is not None
    outs = []
    for count in (1, 2, 3, 8):
        library.qt_set_threads(count, 0)
        requests = Requests(form.shape(2, 1, 32), [3000, 10, 600])
        out = requests.fill()
        out += requests.run([(0, 2999, 1), (1, 9, 1), (2, 590, 10)])
        outs.append(out)
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_threads_that_share_a_kv_head_change_no_bits(form: Format) -> None:
    """One row of many query heads: 2 threads take 20 each, 8 threads 10."""
    library = open_library()
    assert library is not None
    shape = form.shape(40, 1, 48, 32)
    outs = []
    for count in (1, 2, 8):
        library.qt_set_threads(count, 0)
        requests = Requests(shape, [300])
        requests.run([(0, 0, 290)])
        outs.append(requests.run([(0, 290, 9)], features=Features(sinks=torch.arange(40.0))))
        outs[-1] += requests.run([(0, 299, 1)], features=Features(sinks=torch.arange(40.0)))
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(
    "features",
    [PLAIN, Features(window=450), Features(chunk=470, softcap=3.0, sinks=torch.arange(7.0))],
    ids=["plain", "window", "chunk, cap and sinks"],
)
@pytest.mark.parametrize("widths", [(64, 64), (72, 100)])
def test_separate_score_tasks_change_no_bits(
    form: Format, features: Features, widths: tuple[int, int]
) -> None:
    """One row leaves 8 threads idle; three rows of one and two tokens in several partitions leave 64 idle."""
    library = open_library()
    assert library is not None
    lengths = [1400, 702, 497]
    requests = Requests(form.shape(7, 1, widths[0], 32, widths[1]), lengths)
    requests.run([(i, 0, length) for i, length in enumerate(lengths)], 0.2, features)
    outs = []
    for count in (1, 2, 3, 8, 64):
        library.qt_set_threads(count, 0)
        outs.append(requests.run([(2, 496, 1)], 0.2, features))
        outs[-1] += requests.run([(0, 1399, 1), (1, 700, 2), (2, 496, 1)], 0.2, features)
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_more_long_rows_than_fit_in_scratch_memory(threads: int) -> None:
    """96 heads over 12 partitions take 1.2 MB a row; with 32 MB for all rows of a step, some rows are not split."""
    library = open_library()
    assert library is not None
    rows, heads, head_dim, length = 40, 96, 256, 12 * 512
    assert rows * heads * 12 * (head_dim + 2) * 4 > ATTENTION_SCRATCH_BYTES
    kv = PagedKv.of_blocks(4, FP32, 1, head_dim, 512)  # shared by the rows, each in its own order
    layer = PLAIN.layer(Shape(FP32, heads, 1, head_dim, 512), 0.01)
    for number, block in enumerate(kv.memory.view(FP32).view(4, -1)):
        block.copy_(noise(block.numel(), seed=number))
    table = np.random.default_rng(0).integers(0, 4, (rows, 12), np.int32)
    step, arrays = step_of([length - 1] * rows, table)
    q = noise(rows, heads * head_dim, seed=9)
    outs = []
    for count in (1, 32):  # 32 rows: half a row is a thread's share
        library.qt_set_threads(count, 0)
        outs.append(attend(step, layer, q, kv))
    assert arrays is not None
    assert_same_bits(*outs)


def test_scratch_memory_has_the_planned_size() -> None:
    library = open_library()
    assert library is not None
    assert declare(library, "qt_attention_scratch_bytes", result=ctypes.c_int64)() == ATTENTION_SCRATCH_BYTES


def step_of(
    positions: list[int], table: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
) -> tuple[CStep, object]:
    """Return a step with one token per row, in rows of ascending index."""
    count = len(positions)
    slots, starts = np.arange(count, dtype=np.int64), np.array(positions, np.int64)
    ones = np.ones(count, np.int64)
    step = CStep(
        num_tokens=count,
        num_rows=count,
        row_slots=slots.ctypes.data,
        row_starts=starts.ctypes.data,
        row_counts=ones.ctypes.data,
        row_offsets=slots.ctypes.data,
        block_table=table.ctypes.data,
        block_table_stride=table.shape[1],
    )
    return step, (slots, starts, ones)


def rms(weight: torch.Tensor, offset: float) -> Norm:
    return Norm(kind=NormKind.RMS, width=len(weight), eps=1e-5, weight=weight, offset=offset)


def angles_of(dtype: torch.dtype, rows: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines ``[rows, rotary_dim]``."""
    angles = noise(rows, rotary_dim // 2, seed=2)
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin()))
    return cos, sin


ROTATED = {
    "whole": (64, 64, 0, False),
    "a part": (80, 24, 0, False),
    "none": (32, 0, 0, False),
    "adjacent": (64, 64, 0, True),
    "a part, adjacent": (100, 36, 0, True),
    "the tail": (72, 10, 62, False),
    "the tail, adjacent": (576, 64, 512, True),
}
"""Head width, rotary width, first rotary dimension, and whether pairs are adjacent."""


@dtypes
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("norm_offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("norm_last", [False, True])
@pytest.mark.parametrize("rotated", ROTATED.values(), ids=ROTATED.keys())
def test_write_norms_and_rotates(
    dtype: torch.dtype,
    by_token: bool,
    norm_offset: float | None,
    norm_last: bool,
    rotated: tuple[int, int, int, bool],
) -> None:
    """The reference rounds once more than the kernel, so both are compared with fp64 from the normed numbers on."""
    head_dim, rotary_dim, first, interleaved = rotated
    heads, kv_heads = 4, 2
    positions = [0, 16, 32, 48, 64]
    cos, sin = angles_of(dtype, len(positions) if by_token else 100, rotary_dim)
    q_norm, k_norm = (
        None if norm_offset is None else rms(noise(head_dim, seed=seed).to(dtype), norm_offset)
        for seed in (3, 4)
    )
    layer = AttentionLayer(
        index=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=8,
        scale=0.1,
        rope=1 if rotary_dim else None,
        rotary_dim=rotary_dim,
        rotary_first=first,
        interleaved=interleaved,
        q_norm=q_norm,
        k_norm=k_norm,
        norms_after_rope=norm_last and norm_offset is not None,
        temperature=Temperature(0.5, 16, 1),
    )
    kv = PagedKv.of_blocks(25, dtype, kv_heads, head_dim, 16, 8)
    step, arrays = step_of(positions, np.arange(25, dtype=np.int32).reshape(5, 5))
    rotations = (CRotation * 2)(CRotation(), CRotation(cos.data_ptr(), sin.data_ptr(), by_token))
    step.rotations = ctypes.addressof(rotations)
    padded = noise(5, heads * head_dim + 8, seed=5).to(dtype)
    q = padded[:, :-8]
    k, v = (noise(5, kv_heads * width, seed=6).to(dtype) for width in (head_dim, 8))

    written = write_kv(step, layer, q, k, v, kv).view(5, heads, -1)
    assert arrays is not None

    given = q.reshape(5, heads, head_dim)
    given = given if q_norm is None or norm_last else q_norm(given)
    rows = torch.arange(5) if by_token else torch.tensor(positions)
    wide = (part[rows].unsqueeze(1).double() for part in (cos, sin))
    turned = rope(given.double(), *wide, first, interleaved)
    if q_norm is not None and norm_last:
        turned = given = q_norm(turned.to(dtype)).double()
    assert layer.temperature is not None
    factors = temperatures(layer.temperature, torch.tensor(positions))[:, None, None]
    # One rounding, or two where the norms' fp32 noise may round a factor the other way, and the temperature's.
    unit = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-22}[dtype]
    size = given.double().abs().amax(-1, keepdim=True) * 2 * factors
    error = (written[..., :head_dim].double() - turned * factors).abs() / size
    assert error.max() <= (4 if q_norm else 2) * unit
    assert not written[..., head_dim:].any()


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_normed_and_rotated_like_queries(dtype: torch.dtype, interleaved: bool) -> None:
    """Keys equal the queries, so the scores of a softmax over two positions show the keys' rotation."""
    head_dim, rotary_dim = 40, 16
    cos, sin = angles_of(dtype, 2, rotary_dim)
    norm = rms(noise(head_dim, seed=2).to(dtype), 0.0)
    layer = AttentionLayer(
        index=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        scale=0.1,
        rope=0,
        rotary_dim=rotary_dim,
        rotary_first=4,
        interleaved=interleaved,
        q_norm=norm,
        k_norm=norm,
    )
    heads = noise(2, head_dim, seed=3).to(dtype)
    values = torch.stack((torch.zeros(head_dim), torch.ones(head_dim))).to(dtype)
    kv = PagedKv.of_blocks(1, dtype, 1, head_dim, 16)
    table, column = np.zeros((1, 1), np.int32), [np.array([value], np.int64) for value in (0, 2)]
    rotation = CRotation(cos.data_ptr(), sin.data_ptr(), 0)
    step = CStep(
        num_tokens=2,
        num_rows=1,
        row_slots=column[0].ctypes.data,
        row_starts=column[0].ctypes.data,
        row_counts=column[1].ctypes.data,
        row_offsets=column[0].ctypes.data,
        block_table=table.ctypes.data,
        block_table_stride=1,
        rotations=ctypes.addressof(rotation),
    )
    q = write_kv(step, layer, heads, heads, values, kv)
    out = attend(step, layer, q, kv)
    share = torch.softmax(q.double() @ q[1].double() * 0.1, 0)[1]
    check(Format(dtype, dtype, True), out[1:], share.expand(1, head_dim), torch.ones(1, head_dim))


def test_an_int4_cache_has_the_size_that_the_core_counts() -> None:
    assert kv_block_bytes(INT4, 3, 80, 72, 32) == 3 * 2 * (40 + 3 * 4) * 32, (
        "half a byte per number, padding to 16, and two fp16 numbers per 32"
    )
    assert kv_block_bytes(INT4, 1, 64, 32, 16) == (32 + 2 * 4 + 16 + 4) * 16


def test_an_int8_cache_has_the_size_that_the_core_counts() -> None:
    assert kv_block_bytes(INT8, 3, 80, 72, 32) == 3 * (80 + 80 + 8) * 32, (
        "one byte per number, padding to 16, and one scale per head"
    )


def test_unsupported_shapes_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"block size is 24 tokens.*--block-size"):
        kv_block_bytes(BF16, 2, 64, 64, 24)
    with pytest.raises(ConfigError, match=r"head dimensions are 640 \(keys\) and 64 \(values\).*576 and 512"):
        kv_block_bytes(BF16, 2, 640, 64, 16)
    shape = Shape(BF16, 2, 2, 64)
    layer, kv = PLAIN.layer(shape, 0.1), PagedKv.of_blocks(1, BF16, 2, 64, 16)
    step, arrays = step_of([0], np.zeros((1, 1), np.int32))
    assert arrays is not None
    with pytest.raises(ValueError, match=r"\[2, 128\].*expected \[1, 128\]"):
        attend(step, layer, torch.zeros(2, 128, dtype=BF16), kv)
    with pytest.raises(ValueError, match="2 KV heads of dimensions 64 and 64, the cache 2 of 64 and 32"):
        attend(step, layer, torch.zeros(1, 128, dtype=BF16), PagedKv.of_blocks(1, BF16, 2, 64, 16, 32))
    with pytest.raises(ValueError, match=r"KV cache is torch.bfloat16 and q is torch.float32"):
        attend(step, layer, torch.zeros(1, 128), kv)
    with pytest.raises(ValueError, match="scale is 0"):
        attend(step, PLAIN.layer(shape, 0.0), torch.zeros(1, 128, dtype=BF16), kv)
    with pytest.raises(ValueError, match=r"sinks are torch.float32\[3\]; expected contiguous float32\[2\]"):
        attend(step, Features(sinks=torch.zeros(3)).layer(shape, 0.1), torch.zeros(1, 128, dtype=BF16), kv)
