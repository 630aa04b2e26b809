"""Cases of `bench.gpu.kernels` for quantized linear layers: two layers of Llama-3-8B in the formats of checkpoints.

Up to 32 rows are limited by bandwidth, that is by reads of the codes. From 512 rows on, the multiply rate is the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu.kernel_linear import FEW_ROWS, LLAMA_3_8B, MANY_ROWS, TOY
from bench.gpu.kernels import Case, num_calls
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.coded_weight import Code, CodedLayout, CodedWeight
from quintet.executor.backends.cuda.ops.linear import SplitMemory
from quintet.executor.backends.cuda.ops.linear_coded import coded_matmul
from quintet.executor.backends.cuda.ops.linear_fp8 import FP8, fp8_matmul

FORMATS = {
    "int4, groups of 128": partial(CodedLayout, Code.INT4, group=128),
    "int4 with zeros, groups of 128": partial(CodedLayout, Code.INT4, group=128, has_zeros=True),
    "int4 with minima, groups of 32": partial(CodedLayout, Code.INT4, group=32, has_minima=True),
    "int8, groups of 32": partial(CodedLayout, Code.INT8, group=32),
    "fp8, blocks of 128": partial(CodedLayout, Code.FP8, group=128),
    "fp4, groups of 32": partial(CodedLayout, Code.FP4, group=32),
}
"""Formats of GPTQ, AWQ, Q4_K, Q8_0, DeepSeek and MXFP4."""


def cases(device: Device, toy: bool) -> Iterator[Case]:
    """Yield the cases, grouped by size."""
    memory = SplitMemory(device)
    sizes = TOY if toy else {name: LLAMA_3_8B[name] for name in ("gate_up", "down")}
    for name, (columns, depth) in sizes.items():
        for format_name, layout_type in FORMATS.items():
            layout = layout_type(columns=columns, depth=depth)
            weights = [_random_weight(layout, device) for _ in range(num_calls(layout.num_bytes, toy))]
            for rows in (1, 5, 33) if toy else (*FEW_ROWS, *MANY_ROWS):
                x = torch.randn(rows, depth, device=device.torch_device, dtype=torch.bfloat16)
                out = x.new_empty(rows, columns)
                yield Case(
                    f"{name} {columns}x{depth}, {format_name}, {rows} rows",
                    [partial(coded_matmul, device, x, weight, out=out, memory=memory) for weight in weights],
                    num_bytes=layout.num_bytes + 2.0 * rows * (columns + depth),
                    flops=2.0 * rows * columns * depth if rows in MANY_ROWS else 0.0,
                )

        weights_in_fp8 = [
            _random_fp8(columns, depth, device) for _ in range(num_calls(float(columns * depth), toy))
        ]
        for rows in (1, 5, 33) if toy else (*FEW_ROWS, *MANY_ROWS):
            x = torch.randn(rows, depth, device=device.torch_device, dtype=torch.bfloat16)
            out = x.new_empty(rows, columns)
            yield Case(
                f"{name} {columns}x{depth}, fp8 times fp8, {rows} rows",
                [
                    partial(fp8_matmul, device, x, weight, scales, None, out, memory=memory)
                    for weight, scales in weights_in_fp8
                ],
                num_bytes=columns * depth + 2.0 * rows * (columns + depth),
                flops=2.0 * rows * columns * depth if rows in MANY_ROWS else 0.0,
            )


def _random_fp8(columns: int, depth: int, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(columns, depth, dtype=torch.uint8, device=device.torch_device).random_(0, 0x77)
    return codes.view(FP8), torch.full((columns,), 0.01, device=device.torch_device)


def _random_weight(layout: CodedLayout, device: Device) -> CodedWeight:
    """Return a weight with random codes; the time does not depend on values."""
    weight = CodedWeight(layout, device.torch_device)
    weight.codes.random_(0, 0x77)  # excludes NaN in fp8
    weight.scales.fill_(0.01)
    return weight
