"""``top_p``: keep the smallest set of most likely tokens with a total probability of at least p.

Holtzman et al., "The curious case of neural text degeneration", 2020.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.sampling.settings import Settings
from quintet.executor.sampling.threshold import cut_below

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
