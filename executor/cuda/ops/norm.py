"""Norms of rows on the device: RMS norm and layer norm, each also fused with the addition to the residual stream.

The references are torch's own: `quintet.executor.ops.rms_norm`, `gemma_rms_norm` here, and ``F.layer_norm``.
"""

from __future__ import annotations

import torch

from quintet.executor.cuda.device import Device, Kernel
from quintet.executor.cuda.ops.formats import PACK_BYTES, SUFFIXES, check_rows, check_vector

REGISTER_PACKS = 512
"""Packs of 16 bytes that a block of 256 threads keeps in registers, two each; rows of more go to blocks of 1024."""

_THREADS = {"": 256, "_wide": 1024, "_single": 256}
_RMS_NORMS, _LAYER_NORMS = (
    {
        (variant, dtype): Kernel("norm", f"{name}{variant}_{suffix}", kinds)
        for variant in _THREADS
        for dtype, suffix in SUFFIXES.items()
    }
    for name, kinds in (("rms_norm", "plplppifi"), ("layer_norm", "plplpppif"))
)


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * (1 + weight)``, all of it in fp32, rounded once: the reference."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale * (1.0 + weight.float())).to(x.dtype)


def rms_norm(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    one_plus: bool = False,
) -> torch.Tensor:
    """Return `quintet.executor.ops.rms_norm` of each row; with ``one_plus``, `gemma_rms_norm`.

    x: ``[num_rows, width]`` in bf16, fp16 or fp32, rows contiguous; weight: ``[width]``, the same dtype; out: like ``x``
    without gaps between rows, and may be ``x`` itself. A row's bits depend on the row alone.
    """
    return _rms_norm(device, x, None, weight, eps, out, one_plus)


def add_rms_norm(
    device: Device,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    one_plus: bool = False,
) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place, and return `rms_norm` of the sum, which is rounded to the dtype first.

    ``out`` may be ``x``, not ``residual``.
    """
    return _rms_norm(device, x, residual, weight, eps, out, one_plus)


def layer_norm(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``F.layer_norm`` of each row (Ba, Kiros and Hinton, "Layer normalization", 2016), in fp32, rounded once.

    Shapes as in `rms_norm`; bias: like ``weight``. A row's bits depend on the row alone.
    """
    return _layer_norm(device, x, None, weight, bias, eps, out)


def add_layer_norm(
    device: Device,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place, and return `layer_norm` of the sum, which is rounded to the dtype first."""
    return _layer_norm(device, x, residual, weight, bias, eps, out)


def _rms_norm(
    device: Device,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    one_plus: bool,
) -> torch.Tensor:
    out = _checked_output(x, residual, out)
    variant = _variant(x)
    check_vector("weight", weight, x)
    stride = 0 if residual is None else residual.stride(0)
    if len(x):
        device.launch(
            _RMS_NORMS[variant, x.dtype],
            (len(x), 1, 1),
            (_THREADS[variant], 1, 1),
            (x, x.stride(0), residual, stride, weight, out, x.shape[1], eps, int(one_plus)),
        )
    return out


def _layer_norm(
    device: Device,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    out = _checked_output(x, residual, out)
    variant = _variant(x)
    check_vector("weight", weight, x)
    if bias is not None:
        check_vector("bias", bias, x)
    stride = 0 if residual is None else residual.stride(0)
    if len(x):
        device.launch(
            _LAYER_NORMS[variant, x.dtype],
            (len(x), 1, 1),
            (_THREADS[variant], 1, 1),
            (x, x.stride(0), residual, stride, weight, bias, out, x.shape[1], eps),
        )
    return out


def _checked_output(x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    check_rows("x", x, x)
    if residual is not None:
        check_rows("residual", residual, x, x.shape)
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_rows("out", out, x, x.shape)
    if not out.is_contiguous():
        raise ValueError(
            f"out: expected no gaps between rows, got strides {out.stride()} of {list(out.shape)}"
        )
    return out


def _variant(x: torch.Tensor) -> str:
    """Choose by the rows' width alone: so the order of sums does not depend on the batch."""
    pack = PACK_BYTES // x.element_size()
    if x.shape[1] % pack:
        return "_single"
    return "_wide" if x.shape[1] // pack > REGISTER_PACKS else ""
