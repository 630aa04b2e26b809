"""Sampling settings, one record per slot, and the reference filters that read them.

Logits below a row's threshold are dropped. A threshold by value makes a row's result independent of the sort order of
equal logits, and so of the batch. All logits equal to the last kept one are kept.

- ``min_p``: drop tokens below a fraction of the maximum probability (Nguyen et al., "Turning up the heat", 2024).
  Compares logits instead of probabilities: ``p >= min_p * p_max`` is ``logit >= logit_max + log(min_p)``.
- ``top_k``: keep the k most likely tokens (Fan et al., "Hierarchical neural story generation", 2018).
- ``top_p``: keep the smallest set of most likely tokens with a total probability of at least p (Holtzman et al., "The
  curious case of neural text degeneration", 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.memory import to_device
from quintet.executor.ragged import Int
from quintet.wire.params import SamplingParams

Settings: TypeAlias = NDArray[np.void]
"""Records of `RECORD`: of every slot, or of some rows."""

RECORD = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy, the other fields are unused
        ("log_min_p", np.float32),  # -inf: none
        ("top_k", np.int64),  # 0: none
        ("top_p", np.float64),  # 1: none
        ("seed", np.uint64),
    ]
)
"""The layout in csrc/cpu/ops/sampling.hpp."""

SEED_MASK = (1 << 64) - 1


def settings_table(num_slots: int) -> Settings:
    """Return records of ``num_slots`` slots, all greedy."""
    return np.zeros(num_slots, RECORD)


def settings_of(params: SamplingParams, seed: int) -> tuple[float, float, int, float, int]:
    """Return the record of a request."""
    return (
        0.0 if params.greedy else params.temperature,
        float(np.log(np.float32(params.min_p))) if params.min_p > 0.0 else -np.inf,
        params.top_k,
        params.top_p,
        seed & SEED_MASK,
    )


def divide_by_temperature(logits: torch.Tensor, settings: Settings) -> None:
    """Divide each row of ``logits [n, vocab]`` fp32 in place. Greedy rows are never passed."""
    temperatures = settings["temperature"]
    if (temperatures != 1.0).any():
        logits.div_(to_device(temperatures.copy(), logits.device).unsqueeze(1))


def cut_below(logits: torch.Tensor, which: Int, threshold_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Set logits below ``threshold_of(chosen)``, ``[n]`` for the ``n`` rows ``which``, to -inf in place."""
    if len(which) == len(logits):
        logits.masked_fill_(logits < threshold_of(logits).unsqueeze(1), -torch.inf)
        return
    index = to_device(which, logits.device)
    chosen = logits[index]
    chosen.masked_fill_(chosen < threshold_of(chosen).unsqueeze(1), -torch.inf)
    logits[index] = chosen


def cut_min_p(logits: torch.Tensor, settings: Settings) -> None:
    """Set dropped entries of each row of ``logits [n, vocab]`` to -inf, in place."""
    which = np.flatnonzero(settings["log_min_p"] > -np.inf)
    if len(which):
        log_min_p = to_device(settings["log_min_p"][which], logits.device)
        cut_below(logits, which, lambda chosen: chosen.amax(dim=-1) + log_min_p)


def cut_top_k(logits: torch.Tensor, settings: Settings) -> None:
    """Set logits below the k-th largest of each row of ``logits [n, vocab]`` to -inf, in place."""
    all_k = settings["top_k"]
    which = np.flatnonzero((all_k > 0) & (all_k < logits.shape[1]))
    if len(which):
        k = all_k[which]
        last = to_device(k - 1, logits.device).unsqueeze(1)
        cut_below(logits, which, lambda chosen: chosen.topk(int(k.max())).values.gather(1, last).squeeze(1))


NUM_CANDIDATES = 128


def cut_top_p(logits: torch.Tensor, settings: Settings) -> None:
    """Set dropped entries of each row of ``logits [n, vocab]`` to -inf, in place.

    Checks the largest few logits first, and sorts only rows with a wider distribution. Sorting a whole vocabulary
    costs more than the rest of a step. Both give the same threshold, so a row's result does not depend on the batch.
    """
    which = np.flatnonzero(settings["top_p"] < 1.0)
    if len(which):
        p = to_device(settings["top_p"][which], logits.device)
        cut_below(logits, which, lambda chosen: threshold(chosen, p))


def threshold(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return ``[n]``: the smallest logit to keep in each row of ``logits [n, vocab]`` for ``p`` (float64 ``[n]``)."""
    most_likely = torch.softmax(logits, dim=-1).amax(dim=-1)
    largest = logits.topk(min(NUM_CANDIDATES, logits.shape[1])).values
    smallest, reached = _last_kept(largest, most_likely, p)
    wide = (~reached).nonzero().squeeze(1)
    if len(wide):
        descending = logits[wide].sort(dim=-1, descending=True).values
        smallest[wide], _ = _last_kept(descending, most_likely[wide], p[wide])
    return smallest


def _last_kept(
    largest: torch.Tensor, most_likely: torch.Tensor, p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest kept logit of ``largest [n, candidates]`` (descending), and whether the candidates reach ``p``.

    Logits are kept while the mass before them is less than ``p``. ``most_likely`` is the probability of the first.
    """
    shares = (largest - largest[:, :1]).double().exp_().mul_(most_likely.unsqueeze(1))
    mass = shares.cumsum(dim=-1)
    num_before = (mass[:, :-1] < p.unsqueeze(1)).sum(dim=-1, keepdim=True)
    return largest.gather(1, num_before).squeeze(1), mass[:, -1] >= p


FILTERS: tuple[Callable[[torch.Tensor, Settings], None], ...] = (
    divide_by_temperature,
    cut_min_p,
    cut_top_k,
    cut_top_p,
)
"""Filters of the logits of randomly sampled rows, in this order."""
