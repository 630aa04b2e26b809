"""Greedy choice of a token per row."""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest logit of each row, int64 ``[rows]``; ties take the lowest. logits: ``[rows, vocab]``.

    A NaN counts as the largest.
    """
    return logits.argmax(dim=-1)
