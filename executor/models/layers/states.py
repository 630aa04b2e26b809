"""Layers with a state of fixed size: their parameters, and the position of their part in a layer's state.

Parameters are float32 for every model dtype, as in checkpoints: they are few and determine the state's decay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """A part of a layer's state."""

    index: int
    """Layer index."""
    offset: int
    """Offset in bytes in a request's state."""
    shape: tuple[int, ...]

    def of(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the part of every block ``[num_blocks, *shape]``; blocks: uint8 ``[num_blocks, bytes]``."""
        numbers = torch.Size(self.shape).numel() * dtype.itemsize
        part = blocks[:, self.offset : self.offset + numbers].view(dtype)
        return part.view(len(blocks), *self.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CausalConv:
    """See `quintet.executor.backends.cpu.ops.states`. Its state has the model's dtype."""

    state: StatePart
    """``[taps - 1, channels]``"""
    weight: torch.Tensor
    """float32 ``[taps, channels]``"""
    bias: torch.Tensor | None
    """float32 ``[channels]``"""
    silu: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SelectiveScan:
    """See `quintet.executor.backends.cpu.ops.states`. Its state is float32."""

    state: StatePart
    """``[state_size, channels]``"""
    a: torch.Tensor
    """float32 ``[state_size, channels]``"""
    dt_bias: torch.Tensor
    """float32 ``[channels]``; ``skip`` too."""
    skip: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadScan:
    """See `quintet.executor.backends.cpu.ops.states`. Its state is float32."""

    state: StatePart
    """``[heads, state_size, head_dim]``"""
    groups: int
    """Heads of a group share the state's inputs and outputs."""
    a: torch.Tensor
    """float32 ``[heads]``; ``dt_bias`` and ``skip`` too."""
    dt_bias: torch.Tensor
    skip: torch.Tensor
    dt_limits: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaRule:
    """See `quintet.executor.backends.cpu.ops.states`. Its state is float32."""

    state: StatePart
    """``[heads, key_dim, head_dim]``"""
    key_heads: int
    """Each serves ``heads / key_heads`` value heads."""
    a: torch.Tensor
    """float32 ``[heads]``; ``dt_bias`` too."""
    dt_bias: torch.Tensor
