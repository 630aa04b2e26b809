"""Cases of `bench.gpu.kernels` for paged attention: decode compared with bandwidth, prefill with the multiply rate.

Heads are those of Llama-3-8B: 32 query heads and 8 KV heads of 128. Decode reads each row's keys and values once. Prefill
multiplies the pairs that the causal mask allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.gpu.kernel_rows import blocks_for, step_rows
from bench.gpu.kernels import Case, num_calls
from bench.gpu.shapes import BLOCK_SIZE
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention import paged_attention
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.tables import StepRows

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Size:
    """Rows with ``start`` tokens in the cache and ``count`` new tokens."""

    rows: int
    start: int
    count: int = 1
    kv_dtype: torch.dtype = BF16
    fixed_splits: bool = False
    at_least: float | None = None
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        """Prefix of the figures' names."""
        words = "decode" if self.count == 1 else f"{self.count} new tokens"
        cache = ", fp8 KV" if self.kv_dtype == FP8 else ""
        fixed = ", fixed splits" if self.fixed_splits else ""
        return f"attention, {words}, {self.rows} x {self.start}{cache}{fixed}"

    @property
    def num_bytes(self) -> float:
        """Bytes of keys and values of all rows."""
        tokens = self.rows * (self.start + self.count)
        return 2.0 * tokens * self.kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def flops(self) -> float:
        """FLOPs of scores and weighted sums under the causal mask."""
        pairs = self.rows * (self.count * self.start + self.count * (self.count + 1) / 2)
        return 4.0 * pairs * self.heads * self.head_dim


SIZES = (
    Size(1, 1023),
    Size(1, 8191, at_least=80.0),
    Size(1, 32767, at_least=80.0),
    Size(32, 1023),
    Size(32, 8191, at_least=80.0),
    Size(32, 8191, kv_dtype=FP8),
    Size(32, 8191, fixed_splits=True),
    Size(256, 1023),
    Size(64, 8191, at_least=80.0),
    Size(1, 0, 2048),
    Size(1, 0, 8192),
    Size(1, 8192, 1024),
    Size(8, 0, 512),
)
TOY_SIZES = (
    Size(2, 40, heads=4, kv_heads=2, head_dim=64),
    Size(1, 3, 20, heads=4, kv_heads=2, head_dim=64),
)


def cases(device: Device, toy: bool) -> Iterator[Case]:
    """Yield the cases."""
    for size in TOY_SIZES if toy else SIZES:
        plan, rows = plan_for(device, size)
        yield layers_case(device, size, plan, rows, toy)
        if size.rows > 1:
            yield Case(f"{size.name}: plan of the step", [partial(plan.prepare, rows)])


def plan_for(device: Device, size: Size) -> tuple[AttentionPlan, StepRows]:
    """Return an attention plan, and the rows for which it is prepared."""
    length, tokens = size.start + size.count, size.rows * size.count
    plan = AttentionPlan(
        device,
        size.rows,
        tokens,
        size.heads,
        size.kv_heads,
        size.head_dim,
        length,
        BF16,
        size.kv_dtype,
        fixed_splits=size.fixed_splits,
    )
    rows = step_rows(device, size.rows, size.start, size.count)
    plan.prepare(rows)
    return plan, rows


def layers_case(device: Device, size: Size, plan: AttentionPlan, rows: StepRows, toy: bool) -> Case:
    """Return a case with successive layers that use one plan."""
    where = device.torch_device
    length, tokens = size.start + size.count, size.rows * size.count
    shape = (2, blocks_for(size.rows, length), size.kv_heads, BLOCK_SIZE, size.head_dim)
    count = num_calls(size.num_bytes, toy)
    layers = [torch.randn(shape, dtype=BF16, device=where).to(size.kv_dtype) for _ in range(count)]
    q = torch.randn(tokens, size.heads, size.head_dim, device=where).to(BF16)
    out = torch.empty_like(q)
    scale = size.head_dim**-0.5
    calls = [partial(paged_attention, device, plan, q, kv, rows, scale, out=out) for kv in layers]
    flops = size.flops if size.count > 1 else 0.0
    return Case(size.name, calls, size.num_bytes, flops, size.at_least)
