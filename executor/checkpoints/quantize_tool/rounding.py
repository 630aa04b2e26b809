"""Round weights to integers with the scales that lose least, without inputs (`rounded`) and with inputs (`gptq`)."""

from __future__ import annotations

from collections.abc import Sequence
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


DAMPING = 0.01
BLOCK = 128


def gptq(weight: torch.Tensor, hessian: torch.Tensor, target: Target, dtype: torch.dtype) -> Rounded:
    """Quantize a weight ``[rows, depth]`` for inputs with this ``hessian``, fp32 ``[depth, depth]``.

    Rounds one input at a time and compensates its error in the remaining inputs: E. Frantar, S. Ashkboos, T. Hoefler,
    D. Alistarh, "GPTQ: Accurate post-training quantization for generative pre-trained transformers", ICLR 2023 (arXiv
    2210.17323). It minimises the error of the layer's outputs over inputs X, ``|| W X - Q X ||``, with one Hessian
    ``H = X X^T`` for all rows. Section 3.3: the Cholesky factor of the inverse, immediate updates within a block, one batched
    update of the rest, a damping of 1 % of the mean diagonal.

    Inputs are taken in descending order of the diagonal (an option of the paper's code). Groups stay contiguous and their
    scales are fixed first, so no input order is stored.

    Raises ValueError for values that are not finite.
    """
    weight = weight.float()
    stored = scales_of(weight, target, dtype)
    depth = weight.shape[1]
    order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _factor(hessian[order][:, order])
    left = weight[:, order].t().contiguous()  # [depth, rows]: an input is a row
    groups = torch.arange(depth) // (target.group or depth)
    scales = stored.float().t()[groups[order]].contiguous()  # [depth, rows]
    codes = torch.empty(left.shape, dtype=torch.int8)
    levels = levels_of(target)
    for begin in range(0, depth, BLOCK):
        end = min(begin + BLOCK, depth)
        errors = torch.empty(end - begin, left.shape[1])
        for at in range(begin, end):
            code = (left[at] / scales[at]).round_().clamp_(levels.low, levels.high)
            codes[at] = code
            error = (left[at] - code * scales[at]) / factor[at, at]
            left[at + 1 : end] -= factor[at, at + 1 : end, None] * error
            errors[at - begin] = error
        left[end:] -= factor[begin:end, end:].t() @ errors
    placed = torch.empty_like(codes)
    placed[order] = codes
    return Rounded(placed.t().contiguous(), stored)


def _factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse; damping increases until it exists."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0  # inputs that are always zero: any code fits
    damping = DAMPING * float(diagonal.mean())
    for _ in range(8):
        diagonal += damping
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not int(failed):
            upper: torch.Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        damping *= 10
    raise ValueError("has inputs without a positive definite Hessian: use a longer calibration text")


class GptqRounder:
    """A `quintet.executor.checkpoints.quantize_tool.calibrate.Rounder`."""

    def __init__(self, target: Target, scale_dtype: torch.dtype) -> None:
        self._target, self._scale_dtype = target, scale_dtype
        self.found: dict[str, Rounded] = {}

    def round(
        self, names: Sequence[str], weights: Sequence[torch.Tensor], hessian: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        for name, weight in zip(names, weights, strict=True):
            self.found[name] = gptq(weight, hessian, self._target, self._scale_dtype)
        return [self.found[name].numbers for name in names]
