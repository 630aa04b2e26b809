"""Which implementation of each operation a platform uses.

The defaults are the torch references. A faster kernel is one more file beside the reference and one row in
`IMPLEMENTATIONS`; models, which only see `Ops`, do not change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from quintet.executor.ops.paged_attention import AttentionGroup, paged_attention
from quintet.executor.ops.rms_norm import rms_norm
from quintet.executor.ops.rope_kv_write import rope_kv_write
from quintet.executor.platforms.platform import import_string
from quintet.executor.ragged import Int
from quintet.executor.sampling.draw import draw
from quintet.executor.sampling.entries import Entries, entries
from quintet.executor.sampling.settings import Settings


class RmsNorm(Protocol):
    """See `quintet.executor.ops.rms_norm`."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


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
        self, q: torch.Tensor, kv: torch.Tensor, groups: tuple[AttentionGroup, ...], scale: float
    ) -> torch.Tensor: ...


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
    rope_kv_write: RopeKvWrite = rope_kv_write
    paged_attention: PagedAttention = paged_attention
    draw: Draw = draw
    entries: ReportEntries = entries


IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "cpu": {
        "draw": "quintet.executor.sampling.draw_on_host:draw_on_host",
        "entries": "quintet.executor.sampling.entries_on_host:entries_on_host",
    },
    "cuda": {},
}
"""Platform name to operation name to the import string that replaces the torch reference."""


def ops_of(platform: str) -> Ops:
    """Return the operations of a platform."""
    paths = IMPLEMENTATIONS.get(platform, {})
    return replace(Ops(), **{name: import_string(path) for name, path in paths.items()})
