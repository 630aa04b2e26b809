"""Which implementation of each operation a platform uses.

The defaults are the torch references. A faster kernel is one more file beside the reference and one row in
`IMPLEMENTATIONS`; models, which only see `Ops`, do not change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from quintet.executor.ops.embedding import embedding
from quintet.executor.ops.linear import LinearFunction, pack_linear
from quintet.executor.ops.paged_attention import AttentionRows, paged_attention, reads_pages_in_place
from quintet.executor.ops.rms_norm import rms_norm
from quintet.executor.ops.rope_kv_write import rope_kv_write
from quintet.executor.ops.silu_and_mul import silu_and_mul
from quintet.executor.platforms.platform import import_string
from quintet.executor.ragged import Int
from quintet.executor.sampling.draw import draw
from quintet.executor.sampling.entries import Entries, entries
from quintet.executor.sampling.settings import Settings


class RmsNorm(Protocol):
    """See `quintet.executor.ops.rms_norm`."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class PackLinear(Protocol):
    """See `quintet.executor.ops.linear`."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFunction: ...


class Embedding(Protocol):
    """See `quintet.executor.ops.embedding`."""

    def __call__(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...


class SiluAndMul(Protocol):
    """See `quintet.executor.ops.silu_and_mul`."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class RopeKvWrite(Protocol):
    """See `quintet.executor.ops.rope_kv_write`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: torch.Tensor,
        write_index: torch.Tensor,
    ) -> torch.Tensor: ...


class PagedAttention(Protocol):
    """See `quintet.executor.ops.paged_attention`."""

    def __call__(
        self, q: torch.Tensor, kv: torch.Tensor, groups: tuple[AttentionRows, ...], scale: float
    ) -> torch.Tensor: ...


class ReadsPagesInPlace(Protocol):
    """See `quintet.executor.ops.paged_attention`."""

    def __call__(self, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> bool: ...


class Draw(Protocol):
    """See `quintet.executor.sampling.draw`."""

    def __call__(
        self,
        logits: torch.Tensor,
        settings: Settings,
        slots: Int,
        positions: Int,
        rows: Int | None = None,
    ) -> torch.Tensor: ...


class ReportEntries(Protocol):
    """See `quintet.executor.sampling.entries`."""

    def __call__(
        self, logits: torch.Tensor, own: torch.Tensor, num_top: int, rows: Int | None = None
    ) -> Entries: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations, as a model or sampler calls them."""

    rms_norm: RmsNorm = rms_norm
    pack_linear: PackLinear = pack_linear
    embedding: Embedding = embedding
    silu_and_mul: SiluAndMul = silu_and_mul
    rope_kv_write: RopeKvWrite = rope_kv_write
    paged_attention: PagedAttention = paged_attention
    reads_pages_in_place: ReadsPagesInPlace = reads_pages_in_place
    draw: Draw = draw
    entries: ReportEntries = entries


IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "cpu": {
        "draw": "quintet.executor.sampling.draw_on_host:draw_on_host",
        "entries": "quintet.executor.sampling.entries_on_host:entries_on_host",
        "pack_linear": "quintet.executor.ops.linear_on_host:pack_linear_in_tiles",
        "rms_norm": "quintet.executor.ops.pointwise_on_host:rms_norm_on_host",
        "silu_and_mul": "quintet.executor.ops.pointwise_on_host:silu_and_mul_on_host",
        "rope_kv_write": "quintet.executor.ops.pointwise_on_host:rope_kv_write_on_host",
        "paged_attention": "quintet.executor.ops.paged_attention_on_host:paged_attention_on_host",
        "reads_pages_in_place": "quintet.executor.ops.paged_attention_on_host:reads_pages_in_place_on_host",
    },
    "cuda": {},
}
"""Platform name to operation name to the import string that replaces the torch reference."""


def ops_of(platform: str) -> Ops:
    """Return the operations of a platform."""
    paths = IMPLEMENTATIONS.get(platform, {})
    return replace(Ops(), **{name: import_string(path) for name, path in paths.items()})
