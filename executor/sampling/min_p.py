"""``min_p``: drop tokens below a fraction of the maximum probability (Nguyen et al., "Turning up the heat", 2024).

Compares logits instead of probabilities: ``p >= min_p * p_max`` is ``logit >= logit_max + log(min_p)``.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.sampling.settings import Settings
from quintet.executor.sampling.threshold import cut_below


def cut_min_p(logits: torch.Tensor, settings: Settings) -> None:
    """Set dropped entries of each row of ``logits [n, vocab]`` to -inf, in place."""
    which = np.flatnonzero(settings["log_min_p"] > -np.inf)
    if len(which):
        log_min_p = to_device(settings["log_min_p"][which], logits.device)
        cut_below(logits, which, lambda chosen: chosen.amax(dim=-1) + log_min_p)
