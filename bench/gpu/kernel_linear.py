"""Cases of `bench.gpu.kernels` for linear layers in bf16: our kernels and cuBLAS, with the layers of Llama-3-8B.

Up to 32 rows are limited by bandwidth. From 512 rows on, the multiply rate is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.gpu.kernels import Case, num_calls
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.linear import MATVEC_ROWS, SplitMemory, matmul, matvec

LLAMA_3_8B = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "logits": (128256, 4096),
}
TOY = {"qkv": (96, 64), "down": (64, 544)}

FEW_ROWS = (1, 4, 16, 32)
"""Rows of decode steps; the target is 90 % of the bandwidth for one row."""
MANY_ROWS = (512, 4096)
"""Rows of prefill steps."""


def cases(device: Device, toy: bool) -> Iterator[Case]:
    """Yield the cases, grouped by size."""
    memory = SplitMemory(device)
    for name, (columns, depth) in (TOY if toy else LLAMA_3_8B).items():
        weights = _weights(device, columns, depth, toy)
        for rows in (1, 2, 5) if toy else FEW_ROWS:
            yield from _cases_of_size(device, name, weights, rows, memory, is_bound_by_bytes=True)
        if name == "logits":
            continue  # computed for a prompt's last token only
        for rows in (33,) if toy else MANY_ROWS:
            yield from _cases_of_size(device, name, weights[:1], rows, memory, is_bound_by_bytes=False)


def _weights(device: Device, columns: int, depth: int, toy: bool) -> list[torch.Tensor]:
    count = num_calls(2.0 * columns * depth, toy)
    return [
        torch.randn(columns, depth, device=device.torch_device, dtype=torch.bfloat16) for _ in range(count)
    ]


def _cases_of_size(
    device: Device,
    name: str,
    weights: list[torch.Tensor],
    rows: int,
    memory: SplitMemory,
    *,
    is_bound_by_bytes: bool,
) -> Iterator[Case]:
    """Yield a case for each kernel that supports this number of rows."""
    columns, depth = weights[0].shape
    x = torch.randn(rows, depth, device=device.torch_device, dtype=torch.bfloat16)
    out = x.new_empty(rows, columns)
    kernels: dict[str, Callable[[torch.Tensor], object]] = {
        "cublas": lambda weight: torch.mm(x, weight.t(), out=out),
        "matmul": lambda weight: matmul(device, x, weight, out=out, memory=memory),
    }
    if rows <= MATVEC_ROWS:
        kernels["matvec"] = lambda weight: matvec(device, x, weight, out=out)
    num_bytes = 2.0 * (columns * depth + rows * (columns + depth))
    for kernel, multiply in kernels.items():
        yield Case(
            f"{name} {columns}x{depth}, {rows} rows: {kernel}",
            [partial(multiply, weight) for weight in weights],
            num_bytes=num_bytes,
            flops=0.0 if is_bound_by_bytes else 2.0 * rows * columns * depth,
            at_least=90.0 if kernel == "matvec" and rows == 1 else None,
        )
