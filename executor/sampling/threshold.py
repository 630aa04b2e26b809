"""Drop the logits below a row's threshold.

A threshold by value makes a row's result independent of the sort order of equal logits, and so of the batch. All
logits equal to the last kept one are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.memory import to_device
from quintet.executor.ragged import Int


def cut_below(logits: torch.Tensor, which: Int, threshold_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Set logits below ``threshold_of(chosen)``, ``[n]`` for the ``n`` rows ``which``, to -inf in place."""
    if len(which) == len(logits):
        logits.masked_fill_(logits < threshold_of(logits).unsqueeze(1), -torch.inf)
        return
    index = to_device(which, logits.device)
    chosen = logits[index]
    chosen.masked_fill_(chosen < threshold_of(chosen).unsqueeze(1), -torch.inf)
    logits[index] = chosen
