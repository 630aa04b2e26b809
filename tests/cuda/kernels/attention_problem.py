"""Attention steps for tests: rows over a paged cache with NaN in unused positions, so that reading one is visible."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tests.cuda.kernels.references import paged_attention_reference

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention import (
    AttentionPlan,
    paged_attention,
)
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.tables import StepRows
from quintet.executor.models.layers.attention import AttentionWindow

FP8 = torch.float8_e4m3fn
Row = tuple[int, int]
"""Cached tokens, new tokens; ``(0, 0)`` is padding."""


@dataclass(frozen=True)
class Shape:
    """Dimensions that all steps share."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    max_model_len: int = 1024
    windows: tuple[int | None, ...] = (None,)
    chunks: tuple[int, ...] = ()
    value_dim: int | None = None

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    def plan(self, device: Device, *, fixed_splits: bool = False) -> AttentionPlan:
        return AttentionPlan(
            device, 32, 2048, self.num_heads, self.num_kv_heads, self.head_dim, self.max_model_len,
            self.dtype, self.kv_dtype or self.dtype, fixed_splits=fixed_splits, value_dim=self.value_dim,
            attention_windows=(*(AttentionWindow(window) for window in self.windows), *(AttentionWindow(None, chunk) for chunk in
            self.chunks)),
        )  # fmt: skip


def step_rows(
    device: Device,
    rows: Sequence[Row],
    block_table: torch.Tensor,
    slots: Sequence[int],
    block_size: int,
    padding: int,
) -> StepRows:
    """Return the metadata of a step, as csrc/cuda/tables.cu would fill it."""

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device.torch_device)

    offsets, positions, token_rows = [0], [], []
    for row, (start, count) in enumerate(rows):
        offsets.append(offsets[-1] + count)
        positions += range(start, start + count)
        token_rows += [row] * count
    num_tokens = offsets[-1] + padding
    return StepRows(
        num_rows=len(rows),
        num_tokens=num_tokens,
        max_count=max(count for _, count in rows),
        slots=ints(slots),
        starts=ints([start for start, _ in rows]),
        counts=ints([count for _, count in rows]),
        offsets=ints(offsets),
        token_ids=ints([0] * num_tokens),
        positions=ints(positions + [-1] * padding),
        token_rows=ints(token_rows + [-1] * padding),
        block_table=block_table,
        block_size=block_size,
    )


class Problem:
    """A cache with several requests, and steps over them.

    Every request's tokens are drawn once, and a step takes those of its rows. So a token is the same alone, in a chunk
    or with its whole prompt.
    """

    def __init__(self, device: Device, shape: Shape, lengths: Sequence[int], seed: int = 0) -> None:
        self.device, self.shape = device, shape
        self._lengths = list(lengths)
        generator = torch.Generator().manual_seed(seed)
        blocks_each = [-(-length // shape.block_size) for length in lengths]
        num_blocks = sum(blocks_each) + 3
        self._order = torch.randperm(num_blocks, generator=generator).tolist()
        ids = iter(self._order)
        width = max(blocks_each) + 1
        self._tables = torch.tensor(
            [[next(ids) for _ in range(n)] + [-(1 << 20)] * (width - n) for n in blocks_each],
            dtype=torch.int32,
        )
        self._kv = torch.full(
            (2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim), torch.nan
        )
        self._q = [
            torch.randn(length, shape.num_heads, shape.head_dim, generator=generator) for length in lengths
        ]
        for request, length in enumerate(lengths):
            new = torch.randn(2, length, shape.num_kv_heads, shape.head_dim, generator=generator)
            for position in range(length):
                block = self._tables[request, position // shape.block_size]
                self._kv[:, block, :, position % shape.block_size] = new[:, position]

    def of_heads(self, begin: int, end: int) -> Problem:
        """Return the problem of some of the query heads, all of which read one KV head."""
        part = copy.copy(self)
        part.shape = replace(self.shape, num_heads=end - begin)
        part._q = [each[:, begin:end] for each in self._q]
        return part

    def run(
        self,
        rows: Sequence[Row],
        requests: Sequence[int] | None = None,
        *,
        plan: AttentionPlan | None = None,
        padding: int = 0,
        window: int | None = None,
        soft_cap: float = 0.0,
        alibi: torch.Tensor | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
        value_scale: float = 1.0,
    ) -> Step:
        """Compute a step with rows of ``requests`` in order; tokens after a row's last are not in the cache yet."""
        shape, place = self.shape, self.device.torch_device
        requests = list(range(len(rows))) if requests is None else requests
        kv = self._kv.clone()
        ends = dict.fromkeys(requests, 0)
        for request, (start, count) in zip(requests, rows, strict=True):
            ends[request] = max(ends[request], start + count)
        for request, end in ends.items():
            for position in range(end, self._lengths[request]):
                kv[:, self._tables[request, position // shape.block_size], :, position % shape.block_size] = (
                    torch.nan
                )
        slots = [-1 if row == (0, 0) else request for row, request in zip(rows, requests, strict=True)]
        step = step_rows(self.device, rows, self._tables.to(place), slots, shape.block_size, padding)
        parts = [
            self._q[request][start : start + count]
            for request, (start, count) in zip(requests, rows, strict=True)
        ]
        q = torch.cat([*parts, torch.full((padding, shape.num_heads, shape.head_dim), torch.nan)])
        # As in a layer: a slice of the projection's output.
        qkv = (
            torch.cat([q, torch.full((len(q), 2, shape.head_dim), torch.nan)], dim=1)
            .to(shape.dtype)
            .to(place)
        )
        q = qkv[:, : shape.num_heads]
        cache: Planes = kv.to(shape.dtype).to(shape.kv_dtype or shape.dtype).to(place)
        if shape.value_dim is not None:
            cache = in_blocks(cache, shape.value_dim)
        plan = shape.plan(self.device) if plan is None else plan
        plan.prepare(step)
        scale = shape.head_dim**-0.5
        options = (scale, window, soft_cap, alibi)
        more = {"chunk": chunk, "sinks": sinks, "value_scale": value_scale}
        out = paged_attention(self.device, plan, q, cache, step, *options, **more)  # type: ignore[arg-type]
        return Step(out, q, cache, step, options, more)


def in_blocks(kv: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys, and values of this width, of each block side by side, with a gap after them."""
    _, num_blocks, num_kv_heads, size, head_dim = kv.shape
    numbers = num_kv_heads * size * head_dim
    memory = torch.empty(
        (num_blocks, numbers + num_kv_heads * size * value_dim + 16), dtype=kv.dtype, device=kv.device
    )
    keys = memory[:, :numbers].unflatten(1, (num_kv_heads, size, head_dim))
    values = memory[:, numbers:-16].unflatten(1, (num_kv_heads, size, value_dim))
    bits = torch.uint8 if kv.dtype == FP8 else kv.dtype  # torch does not copy fp8 everywhere
    keys.view(bits).copy_(kv[0].view(bits))
    values.view(bits).copy_(kv[1, ..., :value_dim].view(bits))
    return keys, values


@dataclass(frozen=True)
class Step:
    """A computed step with its inputs."""

    out: torch.Tensor
    q: torch.Tensor
    kv: Planes
    rows: StepRows
    options: tuple[float, int | None, float, torch.Tensor | None]
    more: dict[str, int | float | torch.Tensor | None]
    """``chunk``, ``sinks`` and ``value_scale``."""

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the reference, and the error bound of each number of the output.

        Weights and output are rounded to the model's format, each by at most half a unit in the last place, ``u``.
        The weights are rounded where they multiply the values and where they are summed. An output is off by at
        most ``2 u`` times the average of the values' magnitudes, plus ``u`` times itself. The rest is fp32: a tenth
        more and 1e-5 far exceed its roundings over some hundred positions.
        """
        unit = torch.finfo(self.out.dtype).eps / 2 if self.out.dtype != torch.float32 else 0.0
        # Masked numbers are zero here: a weight of 0 times them is 0.
        keys, values = (torch.nan_to_num(plane.float()) for plane in self.kv)
        expected, magnitudes = (
            paged_attention_reference(self.q, (keys, plane), self.rows, *self.options, **self.more)  # type: ignore[arg-type]
            for plane in (values, values.abs())
        )
        return expected, 1.1 * unit * (2 * magnitudes + expected.abs()) + 1e-5

    def check(self) -> None:
        """Compare with the reference."""
        expected, bound = self.expected()
        error = (self.out.float() - expected).abs()
        worst = (error - bound).flatten().argmax()
        assert not self.out.isnan().any(), "reads masked positions"
        assert bool((error <= bound).all()), (
            f"off by {error.flatten()[worst]:.3g}, allowed {bound.flatten()[worst]:.3g}, at {int(worst)} of {tuple(error.shape)}"
        )
