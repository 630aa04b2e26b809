"""Token embedding."""

from __future__ import annotations

import torch


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``weight [vocab, hidden]`` for ``token_ids [num_tokens]`` (int32 or int64)."""
    return weight.index_select(0, token_ids)
