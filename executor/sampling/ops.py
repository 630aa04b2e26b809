"""Implementations of drawing and of log-probabilities, by platform.

The defaults are the torch references. To add kernels, add a file and an entry in `IMPLEMENTATIONS`; the sampler uses
`SamplingOps` only and does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quintet.executor.ragged import Int
from quintet.executor.sampling.draw import draw
from quintet.executor.sampling.host_kernels import draw_on_host, entries_on_host
from quintet.executor.sampling.logprob_entries import LogprobEntries, entries
from quintet.executor.sampling.masks import Masks
from quintet.executor.sampling.settings import Settings

Draw = Callable[[torch.Tensor, Settings, Int, Int, Int | None, Masks | None], torch.Tensor]
"""See `quintet.executor.sampling.draw`."""

ReportEntries = Callable[[torch.Tensor, torch.Tensor, int, Int | None], LogprobEntries]
"""See `quintet.executor.sampling.logprob_entries`."""


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """The operations that the sampler calls."""

    draw: Draw = draw
    entries: ReportEntries = entries


IMPLEMENTATIONS = {"cpu": SamplingOps(draw_on_host, entries_on_host)}
"""Operations by platform; others have the torch references."""


def sampling_ops_of(platform: str) -> SamplingOps:
    return IMPLEMENTATIONS.get(platform, SamplingOps())
