"""Shared parts of the plain decoders: norm, rotation, ALiBi, attention over a whole sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class PlainDecoder(nn.Module):
    """A causal decoder built from a config. Subclasses define ``forward``."""

    hf_config: Mapping[str, Any]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return logits ``[num_tokens, vocab_size]`` for ``token_ids [num_tokens]``."""
        raise NotImplementedError


class RmsNorm(nn.Module):
    """Zhang and Sennrich, "Root mean square layer normalization", 2019."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate ``x [num_tokens, num_heads, head_dim]`` by each token's position: Su et al., "RoFormer", 2021.

    Pair j is numbers j and j + head_dim / 2.
    """
    num_tokens, _, dim = x.shape
    frequencies = theta ** (-torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(num_tokens).float()[:, None, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return the slopes of Press, Smith and Lewis, "Train short, test long", 2021: a geometric series.

    For a number of heads other than a power of two, the rest has every other slope of the series for twice as many.
    """
    below = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (num_heads - below), 2)]
    return torch.tensor(slopes)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``[num_tokens, num_heads * head_dim]``.

    query: ``[num_tokens, num_heads, head_dim]``; key, value: as many heads or a divisor of them; slopes: of ALiBi.
    """
    num_tokens, num_heads, dim = query.shape
    key, value = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(dim)
    behind = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * behind
    weights = scores.masked_fill(behind < 0, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(num_tokens, -1)
