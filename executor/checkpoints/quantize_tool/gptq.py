"""GPTQ: rounds one input at a time and compensates its error in the remaining inputs.

E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh, "GPTQ: Accurate post-training quantization for generative
pre-trained transformers", ICLR 2023 (arXiv 2210.17323). It minimises the error of the layer's outputs over inputs X,
``|| W X - Q X ||``, with one Hessian ``H = X X^T`` for all rows. Section 3.3: the Cholesky factor of the inverse,
immediate updates within a block, one batched update of the rest, a damping of 1 % of the mean diagonal.

Inputs are taken in descending order of the diagonal (an option of the paper's code). Groups stay contiguous and their
scales are fixed first, so no input order is stored.
"""

from __future__ import annotations

import torch

from quintet.executor.checkpoints.quantize_tool.rounding import Rounded, levels_of, scales_of
from quintet.executor.checkpoints.quantize_tool.targets import Target

DAMPING = 0.01
BLOCK = 128


def gptq(weight: torch.Tensor, hessian: torch.Tensor, target: Target, dtype: torch.dtype) -> Rounded:
    """Quantize a weight ``[rows, depth]`` for inputs with this ``hessian``, fp32 ``[depth, depth]``.

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
