"""The most likely token of each row: all that greedy decoding asks of the logits."""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest logit of each row, the lowest one of equals. logits: ``[rows, vocab]``; int64[rows].

    A NaN counts as the largest.
    """
    return logits.argmax(dim=-1)
