"""``top_k``: keep the k most likely tokens (Fan et al., "Hierarchical neural story generation", 2018)."""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.sampling.settings import Settings
from quintet.executor.sampling.threshold import cut_below


def cut_top_k(logits: torch.Tensor, settings: Settings) -> None:
    """Set logits below the k-th largest of each row of ``logits [n, vocab]`` to -inf, in place."""
    all_k = settings["top_k"]
    which = np.flatnonzero((all_k > 0) & (all_k < logits.shape[1]))
    if len(which):
        k = all_k[which]
        last = to_device(k - 1, logits.device).unsqueeze(1)
        cut_below(logits, which, lambda chosen: chosen.topk(int(k.max())).values.gather(1, last).squeeze(1))
