"""The one way to drop tokens: everything below a row's threshold.

Cutting by value makes a row's outcome independent of how a sort orders equals, and so of the batch: equals of the last
token kept are all kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.memory import to_device
from quintet.executor.ragged import Int


def cut_below(logits: torch.Tensor, which: Int, threshold_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Set to -inf, in place, what is below ``threshold_of(chosen)``, ``[n]`` for the ``n`` rows ``which``."""
    if len(which) == len(logits):
        logits.masked_fill_(logits < threshold_of(logits).unsqueeze(1), -torch.inf)
        return
    index = to_device(which, logits.device)
    chosen = logits[index]
    chosen.masked_fill_(chosen < threshold_of(chosen).unsqueeze(1), -torch.inf)
    logits[index] = chosen
