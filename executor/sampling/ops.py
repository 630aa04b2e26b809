"""Implementations of drawing and of log-probabilities, by platform.

The defaults are the torch references. To add kernels, add a file and an entry in `IMPLEMENTATIONS`; the sampler uses
`SamplingOps` only and does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quintet.executor.ragged import Int
from quintet.executor.sampling.draw import draw
from quintet.executor.sampling.host_kernels import draw_on_host, entries_on_host
from quintet.executor.sampling.logprob_entries import LogprobEntries, entries
from quintet.executor.sampling.masks import Masks
from quintet.executor.sampling.settings import Settings


class Draw(Protocol):
    """See `quintet.executor.sampling.draw`."""

    def __call__(
        self,
        logits: torch.Tensor,
        settings: Settings,
        slots: Int,
        positions: Int,
        rows: Int | None = None,
        masks: Masks | None = None,
    ) -> torch.Tensor: ...


class ReportEntries(Protocol):
    """See `quintet.executor.sampling.logprob_entries`."""

    def __call__(
        self, logits: torch.Tensor, own: torch.Tensor, num_top: int, rows: Int | None = None
    ) -> LogprobEntries: ...


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """The operations that the sampler calls."""

    draw: Draw = draw
    entries: ReportEntries = entries


IMPLEMENTATIONS = {"cpu": SamplingOps(draw_on_host, entries_on_host)}
"""Operations by platform; others have the torch references."""


def sampling_ops_of(platform: str) -> SamplingOps:
    return IMPLEMENTATIONS.get(platform, SamplingOps())
