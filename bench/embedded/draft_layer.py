"""Parts of draft heads in training: a Llama layer without a cache, its attention over consecutive drafts, and a first fit.

Hidden states are ``[batch, tokens, hidden]``. Tensors have the names of a checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.embedded.chats import Texts

NUM_FITTED = 50_000
"""Tokens that the first weights are fitted to."""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Output layer of some of the tokens."""

    ids: torch.Tensor
    """Token ids, one per logit."""
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[…, ids]`` of normed hidden states."""
        return F.linear(hidden, self.weight, self.bias)


class DraftLayer(nn.Module):
    """A Llama layer. Its output projections begin as zeros."""

    frequencies: torch.Tensor

    def __init__(self, config: Any, width: int, frequencies: torch.Tensor) -> None:
        """width: of the attention's input. frequencies: of rotations, in radians per position."""
        super().__init__()
        hidden, self.num_heads = config.hidden_size, config.num_attention_heads
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, head_dim_of(config)
        kv = self.num_kv_heads * self.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": matrix(width, self.num_heads * self.head_dim),
                "k_proj": matrix(width, kv),
                "v_proj": matrix(width, kv),
                "o_proj": matrix(self.num_heads * self.head_dim, hidden, gain=0.0),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": matrix(hidden, config.intermediate_size),
                "up_proj": matrix(hidden, config.intermediate_size),
                "down_proj": matrix(config.intermediate_size, hidden, gain=0.0),
            }
        )
        self.input_layernorm = Norm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(hidden, config.rms_norm_eps)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return the layer's hidden states of the newest draft; append its keys and values to those of earlier drafts.

        x: normed input of the attention, ``[batch, tokens, width]``.
        """
        repeats = self.num_heads // self.num_kv_heads
        q = rotated(self._heads(x, "q", self.num_heads), self.frequencies)
        k = rotated(self._heads(x, "k", self.num_kv_heads), self.frequencies)
        keys.append(k.repeat_interleave(repeats, 1))
        values.append(self._heads(x, "v", self.num_kv_heads).repeat_interleave(repeats, 1))
        attended = drafted_attention(q, keys, values).transpose(1, 2).flatten(2)
        hidden = residual + self.self_attn["o_proj"](attended)
        y = self.post_attention_layernorm(hidden)
        gated = F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y)
        result: torch.Tensor = hidden + self.mlp["down_proj"](gated)
        return result

    def _heads(self, x: torch.Tensor, name: str, count: int) -> torch.Tensor:
        y = self.self_attn[f"{name}_proj"](x)
        heads: torch.Tensor = y.unflatten(-1, (count, self.head_dim)).transpose(1, 2)
        return heads


class Norm(nn.RMSNorm):
    """An RMS norm in float32, also of bfloat16 hidden states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normed."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)


class ScaledNorm(nn.RMSNorm):
    """An RMS norm that divides channels by their sizes, since some are a thousand times larger than others."""

    scale: torch.Tensor

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__(hidden, eps)
        self.register_buffer("scale", torch.ones(hidden))

    @torch.no_grad()
    def fit(self, x: torch.Tensor) -> torch.Tensor:
        """Set the sizes to those of ``x [tokens, hidden]``; return it normed."""
        normed = F.rms_norm(x, x.shape[-1:], eps=self.eps)
        self.scale = sizes_of(normed)
        return normed / self.scale

    @property
    def folded(self) -> torch.Tensor:
        """Weight of a plain norm with the same result."""
        return self.weight / self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normed."""
        return F.rms_norm(x.float(), x.shape[-1:], self.folded, self.eps)


def head_dim_of(config: Any) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def matrix(num_inputs: int, num_outputs: int, gain: float = 0.5) -> nn.Linear:
    """Return a random matrix without bias."""
    linear = nn.Linear(num_inputs, num_outputs, bias=False)
    nn.init.normal_(linear.weight, std=gain * num_inputs**-0.5)
    return linear


def norm_like(norm: Any, hidden: int, eps: float) -> Norm:
    """Return a copy of a model's norm."""
    copied = Norm(hidden, eps)
    copied.weight.data.copy_(norm.weight)
    return copied


def sizes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each channel of ``x [tokens, channels]``."""
    return x.square().mean(0).sqrt().clamp(min=1e-6)


def fitted_places(texts: Texts) -> torch.Tensor:
    """Return the indices of the answers' tokens that the first weights are fitted to."""
    return texts.is_answer.nonzero()[:NUM_FITTED, 0]


def linear_fit(inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the matrix ``[outputs, inputs]`` with the least squared error."""
    products = inputs.T @ inputs
    products.diagonal().add_(0.01 * len(inputs))
    solved: torch.Tensor = torch.linalg.solve(products, inputs.T @ wanted)
    return solved.T


def later(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return x ``[batch, tokens, …]`` moved to later tokens, with zeros before them."""
    return F.pad(x, (0, 0, count, 0))[:, : x.shape[1]]


def rotated(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return x ``[batch, heads, tokens, width]`` rotated by position."""
    angles = torch.outer(torch.arange(x.shape[2]).float(), frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def drafted_attention(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Return the attention of the newest draft: to the model's tokens, then to one key of each earlier draft and its own.

    The query of draft ``d`` at position ``i`` sees keys of the first draft up to ``i - d``, and the key of draft ``m`` at
    ``i - d + m``: keys of the first draft are from hidden states of the model.
    """
    num_tokens, newest = q.shape[2], len(keys) - 1
    scores = q @ keys[0].transpose(-1, -2)
    seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(-newest)
    columns = [scores.masked_fill(~seen, -math.inf)]
    shifted = [
        F.pad(each, (0, 0, newest - draft, 0))[:, :, :num_tokens] for draft, each in enumerate(keys) if draft
    ]
    columns += [(q * each).sum(-1, keepdim=True) for each in shifted]
    weights = torch.softmax(torch.cat(columns, -1) * q.shape[-1] ** -0.5, dim=-1)
    total = weights[..., :num_tokens] @ values[0]
    for draft in range(1, newest + 1):
        moved = F.pad(values[draft], (0, 0, newest - draft, 0))[:, :, :num_tokens]
        total = total + weights[..., num_tokens + draft - 1, None] * moved
    return total
