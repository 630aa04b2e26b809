"""RMS norm and layer norm, optionally fused with the addition to the residual stream.

The references are `quintet.executor.backends.cpu.ops.rms_norm` and ``F.layer_norm``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import PACK_BYTES, SUFFIXES, check_rows, check_vector

REGISTER_PACKS = 512
"""Packs of 16 bytes that a block of 256 threads keeps in registers, two per thread; wider rows use blocks of 1024."""

_THREADS = {"": 256, "_wide": 1024, "_single": 256}
_RMS_NORMS, _LAYER_NORMS = (
    {
        (variant, dtype): Kernel("norm", f"{name}{variant}_{suffix}", kinds)
        for variant in _THREADS
        for dtype, suffix in SUFFIXES.items()
    }
    for name, kinds in (("rms_norm", "plplpppiffi"), ("layer_norm", "plplppppif"))
)


def rms_norm(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    offset: float = 0.0,
    rounds_once: bool = False,
) -> torch.Tensor:
    """Return `quintet.executor.backends.cpu.ops.rms_norm` of each row.

    x: ``[num_rows, width]`` in bf16, fp16 or fp32, rows contiguous; weight: ``[width]``, the same dtype; out: like ``x``,
    contiguous; may be ``x``. A row's bits depend only on that row.
    """
    scalars = (eps, offset, int(rounds_once or offset != 0.0))
    return _norm(device, _RMS_NORMS, x, None, None, out, {"weight": weight}, *scalars)


def add_rms_norm(
    device: Device,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    *,
    offset: float = 0.0,
    rounds_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``residual + x``, rounded to the dtype, and `rms_norm` of it.

    total: contiguous output for the sum; it may be ``x`` or ``residual``. ``out`` may be ``x``, unless that is ``total``.
    """
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if total is None else total
    scalars = (eps, offset, int(rounds_once or offset != 0.0))
    return total, _norm(device, _RMS_NORMS, x, residual, total, out, {"weight": weight}, *scalars)


def layer_norm(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Return ``F.layer_norm`` of each row (Ba, Kiros and Hinton, "Layer normalization", 2016), in fp32, rounded once.

    Shapes as in `rms_norm`; bias: like ``weight``. A row's bits depend only on that row.
    """
    return _norm(device, _LAYER_NORMS, x, None, None, None, {"weight": weight, "bias": bias}, eps)


def add_layer_norm(
    device: Device,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``residual + x``, rounded to the dtype, and `layer_norm` of it."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    vectors = {"weight": weight, "bias": bias}
    return total, _norm(device, _LAYER_NORMS, x, residual, total, None, vectors, eps)


def _norm(
    device: Device,
    kernels: Mapping[tuple[str, torch.dtype], Kernel],
    x: torch.Tensor,
    residual: torch.Tensor | None,
    total: torch.Tensor | None,
    out: torch.Tensor | None,
    vectors: Mapping[str, torch.Tensor | None],
    *scalars: float,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if device.checks_arguments:
        _check(x, residual, total, out, vectors)
    variant, stride = _variant(x), 0 if residual is None else residual.stride(0)
    num_rows, width = x.shape
    if num_rows:
        device.launch(
            kernels[variant, x.dtype],
            (num_rows, 1, 1),
            (_THREADS[variant], 1, 1),
            (x, x.stride(0), residual, stride, total, *vectors.values(), out, width, *scalars),
        )
    return out


def _check(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    total: torch.Tensor | None,
    out: torch.Tensor,
    vectors: Mapping[str, torch.Tensor | None],
) -> None:
    check_rows("x", x, x)
    for name, vector in vectors.items():
        if vector is not None:
            check_vector(name, vector, x)
    if residual is not None:
        check_rows("residual", residual, x, x.shape)
    for name, rows in (("total", total), ("out", out)):
        if rows is None:
            continue
        check_rows(name, rows, x, x.shape)
        if not rows.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {rows.stride()} of {list(rows.shape)}"
            )


def _variant(x: torch.Tensor) -> str:
    """Select the kernel by the row width only, so that the order of summation does not depend on the batch."""
    pack = PACK_BYTES // x.element_size()
    if x.shape[1] % pack:
        return "_single"
    return "_wide" if x.shape[1] // pack > REGISTER_PACKS else ""
