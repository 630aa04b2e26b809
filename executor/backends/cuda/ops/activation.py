"""Gated activations; the reference is the second half of `quintet.executor.backends.cpu.ops.linear`."""

from __future__ import annotations

from enum import Enum

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import PACK_BYTES, SUFFIXES, check_rows


class Gate(Enum):
    """Activation of the gates; the value is a prefix of the kernel's name."""

    SILU = "silu_and_mul"
    GELU = "gelu_and_mul"
    """Exact, with the error function."""
    GELU_TANH = "gelu_tanh_and_mul"
    """tanh approximation."""


_KERNELS = {
    (gate, in_packs, dtype): Kernel(
        "activation", f"{gate.value}{'' if in_packs else '_single'}_{suffix}", "plpi"
    )
    for gate in Gate
    for in_packs in (True, False)
    for dtype, suffix in SUFFIXES.items()
}


def gated(device: Device, x: torch.Tensor, gate: Gate, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``gate(first half) * second half`` of each row; the gate is rounded to the dtype.

    The last bit of the gate may differ from torch's, because the exponential rounds differently.

    x: ``[num_rows, 2 * width]`` in bf16, fp16 or fp32, rows contiguous; out: contiguous ``[num_rows, width]``. A row's bits
    depend only on that row.
    """
    num_rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if device.checks_arguments:
        _check(x, out)
    pack = PACK_BYTES // x.element_size()
    in_packs = width % pack == 0
    num_units = width // pack if in_packs else width
    if num_rows and width:
        device.launch(
            _KERNELS[gate, in_packs, x.dtype],
            (num_rows, -(-num_units // 256), 1),
            (256, 1, 1),
            (x, x.stride(0), out, width),
        )
    return out


def _check(x: torch.Tensor, out: torch.Tensor) -> None:
    """Raise `ValueError` for an unsupported tensor."""
    check_rows("x", x, x)
    if x.shape[1] % 2:
        raise ValueError(f"x: expected an even row width, got {list(x.shape)}")
    check_rows("out", out, x, (x.shape[0], x.shape[1] // 2))
    if not out.is_contiguous():
        raise ValueError(
            f"out: expected a contiguous tensor, got strides {out.stride()} of {list(out.shape)}"
        )
