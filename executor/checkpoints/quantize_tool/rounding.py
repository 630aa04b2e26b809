"""Round weights to integers with the scales that lose least."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.checkpoints.gguf.blocks.scale_search import Levels, fit_scale
from quintet.executor.checkpoints.quantize_tool.targets import Target

_SPREAD = 2.0**-24
"""Smallest scale of a group relative to the row's largest; loaders store scales relative to it."""
_CHUNK = 1 << 16


def levels_of(target: Target) -> Levels:
    """Return the allowed codes."""
    half = 1 << (target.bits - 1)
    return Levels(-half, half - 1)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A quantized weight: ``codes * scales`` of their groups."""

    codes: torch.Tensor
    """int8 ``[rows, depth]``."""
    scales: torch.Tensor
    """``[rows, groups]`` in their stored number format."""

    @property
    def numbers(self) -> torch.Tensor:
        """Dequantized weight, fp32 ``[rows, depth]``."""
        grouped: torch.Tensor = self.codes.unflatten(1, (self.scales.shape[1], -1)).float()
        return (grouped * self.scales.float()[..., None]).flatten(1)


def scales_of(weight: torch.Tensor, target: Target, dtype: torch.dtype) -> torch.Tensor:
    """Return the non-negative scales of a weight fp32 ``[rows, depth]``: ``[rows, groups]`` in ``dtype``."""
    rows, depth = weight.shape
    if not weight.isfinite().all():
        raise ValueError("has values that are not finite")
    if target.bits == 8:
        largest = weight.unflatten(1, (-1, target.group or depth)).abs().amax(2)
        scales = largest / levels_of(target).high
    else:
        columns = weight.reshape(-1, target.group or depth).t()
        step = max(1, _CHUNK // len(columns))
        parts = [
            fit_scale(part.contiguous(), levels_of(target), positive=True)
            for part in columns.split(step, dim=1)
        ]
        scales = torch.cat(parts).view(rows, -1)
    largest = scales.amax(1, keepdim=True)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)  # rows of zeros
    least: torch.Tensor = largest * _SPREAD
    return torch.maximum(scales, least).to(dtype)


def rounded(weight: torch.Tensor, target: Target, dtype: torch.dtype) -> Rounded:
    """Round a weight ``[rows, depth]`` of any floating-point format to the nearest codes. Raises ValueError."""
    weight = weight.float()
    scales = scales_of(weight, target, dtype)
    grouped = weight.unflatten(1, (scales.shape[1], -1)) / scales.float()[..., None]
    codes = grouped.round_().clamp_(levels_of(target).low, levels_of(target).high)
    return Rounded(codes.flatten(1).to(torch.int8), scales)
