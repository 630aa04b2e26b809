"""One-shot all-reduce over ranks, for row-parallel layers."""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.formats import PACK_BYTES, check_vector, describe, number_format
from quintet.executor.backends.cuda.ops.peers import EXCHANGE, THREADS, Peers, chunks_of


def all_reduce(
    device: Device,
    peers: Peers,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of all ranks' ``x [rows, width]`` plus the bias, with the same bits at every rank.

    bf16, fp16 or fp32; x and out are contiguous and 16-byte aligned; bias: ``[width]``. ``out`` may be ``x``. An element's bits
    depend only on the ranks' values, not on the message size or its position.
    """
    out = torch.empty_like(x) if out is None else out
    for name, rows in (("x", x), ("out", out)):
        fits = rows.shape == x.shape and rows.dtype == x.dtype and rows.is_contiguous()
        if not fits or rows.ndim != 2 or rows.data_ptr() % PACK_BYTES:
            raise ValueError(
                f"{name}: expected contiguous {x.dtype}{list(x.shape)} at a multiple of {PACK_BYTES} bytes, got {describe(rows)}"
            )
    if bias is not None:
        check_vector("bias", bias, x)
    if not x.numel():
        return out
    width, pack = x.shape[1], PACK_BYTES // x.element_size()
    unit = pack if width % pack == 0 else 1  # elements
    blocks, chunk = chunks_of(x.numel() // unit, unit * x.element_size())
    variant = "" if unit > 1 else "single_"
    name = f"all_reduce_{peers.size}_{variant}{number_format(x)}"
    device.launch(
        Kernel("all_reduce", name, f"{EXCHANGE}ppplii"),
        (blocks, 1, 1),
        (THREADS, 1, 1),
        (*peers.arguments, x, bias, out, x.numel(), width, chunk * unit),
    )
    return out
