"""Requests with known queries, keys and values, and a KV cache that is filled step by step, for attention tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from tests.executor.kernels.instruction_sets import MATRIX_UNITS, isa

from quintet.executor.backends.cpu.ops.host_attention import PagedKv, attend, write_kv
from quintet.executor.backends.cpu.program.step import CStep
from quintet.executor.models.layers.attention import AttentionLayer, KvScales

Row = tuple[int, int, int]
"""Request, first position, number of tokens."""


FP8_SCALES = 0.00785, 0.5
"""Of the first head's keys, some of which overflow e4m3, and of its values, many of which are subnormal. The scales of each
further head are 1.375 times the previous ones."""


@dataclass(frozen=True)
class Shape:
    """Heads and formats."""

    dtype: torch.dtype = torch.bfloat16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    kv_dtype: torch.dtype | None = None
    """None: the same. fp8 is divided by `FP8_SCALES`."""
    value_dim: int | None = None
    """None: the same."""
    values_in_keys: bool = False

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def kv_scales(self) -> KvScales:
        """Return separate scales for each head."""
        key, value = (each * 1.375 ** torch.arange(self.kv_heads, dtype=torch.float32) for each in FP8_SCALES)
        return KvScales(key, key if self.values_in_keys else value)


@dataclass(frozen=True)
class Features:
    """Optional features of a layer."""

    window: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    chunk: int | None = None
    sinks: torch.Tensor | None = None

    def layer(self, shape: Shape, scale: float) -> AttentionLayer:
        """Return a layer without rotation."""
        return AttentionLayer(
            index=0,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            values_in_keys=shape.values_in_keys,
            scale=scale,
            window=self.window,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            chunk=self.chunk,
            sinks=self.sinks,
            kv_scales=shape.kv_scales,
        )


PLAIN = Features()


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Requests:
    """``lengths[i]`` tokens of request ``i``, in scattered blocks of a cache full of NaN."""

    shape: Shape
    lengths: list[int]
    seed: int = 0
    qkv: list[torch.Tensor] = field(init=False)
    kv: PagedKv = field(init=False)
    table: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        width = (shape.heads + shape.kv_heads) * shape.head_dim + shape.kv_heads * shape.value_width
        self.qkv = [
            noise(length, width, seed=1000 * self.seed + i).to(shape.dtype)
            for i, length in enumerate(self.lengths)
        ]
        columns = -(-max(self.lengths) // shape.block_size)
        num_blocks = columns * len(self.lengths) + 3
        free = np.random.default_rng(self.seed).permutation(num_blocks).astype(np.int32)
        self.table = np.full((len(self.lengths) + 1, columns), num_blocks - 1, np.int32)
        for i, length in enumerate(self.lengths):
            count = -(-length // shape.block_size)
            self.table[i, :count], free = free[:count], free[count:]
        dtype = shape.kv_dtype or shape.dtype
        self.kv = PagedKv.of_blocks(
            *(num_blocks, dtype, shape.kv_heads, shape.head_dim, shape.block_size, shape.value_dim),
            values_in_keys=shape.values_in_keys,
        )
        self.kv.memory.fill_(0xFF)  # NaN in every format

    def run(self, rows: list[Row], scale: float = 0.125, features: Features = PLAIN) -> list[torch.Tensor]:
        """Write the rows' keys and values, and return their outputs ``[count, heads * value_dim]``."""
        slots, starts, counts = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        offsets = np.cumsum(counts) - counts
        step = CStep(
            num_tokens=int(counts.sum()),
            num_rows=len(rows),
            row_slots=slots.ctypes.data,
            row_starts=starts.ctypes.data,
            row_counts=counts.ctypes.data,
            row_offsets=offsets.ctypes.data,
            block_table=self.table.ctypes.data,
            block_table_stride=self.table.shape[1],
        )
        qkv = torch.cat([self.qkv[request][start : start + count] for request, start, count in rows])
        layer = features.layer(self.shape, scale)
        out = attend(step, layer, write_kv(step, layer, *qkv.split(self._widths, 1), self.kv), self.kv)
        return list(out.split(counts.tolist()))

    @property
    def _widths(self) -> list[int]:
        shape = self.shape
        kv_heads = shape.kv_heads
        return [shape.heads * shape.head_dim, kv_heads * shape.head_dim, kv_heads * shape.value_width]

    def fill(self) -> list[torch.Tensor]:
        """Compute every request in one step."""
        return self.run([(i, 0, length) for i, length in enumerate(self.lengths)])

    def parts(self, request: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a request's queries, and its keys and values as cached, ``[tokens, heads, head_dim]`` in fp64."""
        shape = self.shape
        q, k, v = self.qkv[request].split(self._widths, 1)
        q, k = (x.unflatten(1, (-1, shape.head_dim)) for x in (q, k))
        v = v.unflatten(1, (-1, shape.value_width))
        if shape.kv_dtype is torch.float8_e4m3fn:
            key_scales, value_scales = shape.kv_scales.key, shape.kv_scales.value
            assert key_scales is not None and value_scales is not None
            k, v = in_eighths(k, key_scales[:, None]), in_eighths(v, value_scales[:, None])
        else:
            stored = STORED.get(shape.kv_dtype, torch.Tensor.double)
            k, v = stored(k), stored(v)
        if (shape.dtype, shape.kv_dtype) == (torch.bfloat16, torch.quint4x2) and isa() in MATRIX_UNITS:
            k, v = round_away_to_bf16(k), round_away_to_bf16(v)
        if shape.values_in_keys:
            v = k[..., : shape.value_width]
        return q.double(), k, v


def in_255_steps(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of 255 steps between the largest magnitude of a head and its negative, in fp64."""
    most = x.float().abs().amax(-1, keepdim=True)
    # Not `127.0 / most`: torch computes it by the reciprocal, which rounds twice.
    steps = torch.full_like(most, 127.0) / most
    return (x.float() * steps).round().double() * (most / 127.0).double()


def in_16_steps(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest of 16 steps between the minimum and maximum of each 32 numbers of a head, in fp64."""
    groups = []
    for group in x.float().split(32, -1):
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        step = in_half((high - low) / torch.full_like(low, 15.0))
        least = in_half(low)
        steps = torch.where(step > 0, torch.ones_like(step) / step, 0.0)
        groups.append(((group - least) * steps).clamp(0.0, 15.0).round().double() * step + least)
    return torch.cat(groups, -1)


def in_eighths(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide by ``scale``, round to e4m3 with a maximum of 448, and multiply, in fp64. scale: fp32, of all or of each head."""
    codes = (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.double() * scale.double()


def round_away_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to bf16 as a matrix unit reads 4-bit numbers: nearest bf16 of the fp32 value, ties away from zero."""
    bits = (x.float().view(torch.int32) + 0x8000) & -0x10000
    return bits.view(torch.float32).double()


def in_half(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest fp16, saturating instead of infinity."""
    return x.clamp(-65504.0, 65504.0).half().float()


STORED: dict[torch.dtype | None, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.int8: in_255_steps,
    torch.quint4x2: in_16_steps,
}
"""Rounding of numbers in the cache, in fp64, for formats that do not keep them exactly."""


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, features: Features
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention ``[tokens, heads * value_dim]`` in fp64, and the same weighted average of the values' magnitudes."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if features.softcap is not None:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    at, to = torch.arange(len(q))[:, None], torch.arange(len(k))
    if features.alibi_slopes is not None:
        scores = scores + features.alibi_slopes.double()[:, None, None] * (to - at)
    hidden = to > at
    if features.window is not None:
        hidden = hidden | (to <= at - features.window)
    if features.chunk is not None:
        hidden = hidden | (to // features.chunk < at // features.chunk)
    scores = scores.masked_fill(hidden, -torch.inf)
    if features.sinks is not None:
        sinks = features.sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    out = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
    size = torch.einsum("hqk,khd->qhd", weights, values.abs()).flatten(1)
    return out, size
