"""fp8 (e4m3) GEMM: ``csrc/cuda/linear_fp8.cu``, with dynamic per-row quantization of x.

The order of summation is the same for any number of rows, and every row has its own scale. So the bits of a row depend only on
that row and the weight.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.backends.cuda.ops.linear import (
    CHUNK_UNIT,
    OperandError,
    SplitMemory,
    Tile,
    check_rows,
    chunk_units,
    splitting_is_faster,
)

SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
PACK = 16
"""Elements per 16 bytes; the depth is a multiple of it."""
QUANTIZE_THREADS = 128

TILES = (Tile(16, 64, 128, 6, 128, 3), Tile(32, 64, 128, 5, 128, 3), Tile(64, 64, 128, 3, 128, 2))
_KERNELS = {
    (tile.rows, dtype): Kernel("linear_fp8", f"fp8_{tile.rows}x{tile.columns}_{suffix}", "ppppppppiiilii")
    for tile in TILES
    for dtype, suffix in SUFFIXES.items()
}
_QUANTIZE = {
    dtype: Kernel("linear_fp8", f"fp8_quantize_{suffix}", "pppil") for dtype, suffix in SUFFIXES.items()
}


def fp8_quantize_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `fp8_quantize`."""
    most = x.float().abs().amax(1)
    scales = torch.where(most > 0, most / FP8_MAX, 1.0)
    return (x.float() / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def fp8_matmul_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    result_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `fp8_matmul`: unscaled sums in fp32, then both scales and the bias, rounded once to ``result_dtype`` or x's."""
    codes, row_scales = fp8_quantize_reference(x)
    y = (codes.float() @ weight.float().t()) * (row_scales[:, None] * scales)
    return (y if bias is None else y + bias.float()).to(result_dtype or x.dtype)


def fp8_quantize(device: Device, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x to e4m3 ``[num_rows, depth]`` with one scale per row, fp32 ``[num_rows]``."""
    num_rows, depth = x.shape
    codes = torch.empty(num_rows, depth, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, device=x.device)
    if num_rows:
        device.launch(
            _QUANTIZE[x.dtype],
            (num_rows, 1, 1),
            (QUANTIZE_THREADS, 1, 1),
            (x, codes, scales, depth, x.stride(0)),
        )
    return codes.view(FP8), scales


def fp8_matmul(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    memory: SplitMemory | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Quantize x to e4m3 and return ``x @ (weight * scales).T + bias`` ``[num_rows, columns]``.

    x: ``[num_rows, depth]``, bf16 or fp16, rows contiguous; weight: contiguous e4m3 ``[columns, depth]``, depth a multiple of 16;
    scales: fp32 ``[columns]``; bias: ``[columns]``; out: of x's dtype or fp32. The bits do not depend on num_rows, ``memory`` or
    ``tile``.
    """
    _check_weight(x, weight, scales)
    (num_rows, depth), columns = x.shape, len(weight)
    out = check_rows(device, x, columns, bias, out)
    if num_rows == 0:
        return out
    if tile is None:
        tile = next((each for each in TILES if num_rows <= each.rows), TILES[-1])
    codes, row_scales = fp8_quantize(device, x)
    tiles = -(-num_rows // tile.rows) * -(-columns // tile.columns)
    units = chunk_units(depth, FP8)
    chunks = -(-depth // (units * CHUNK_UNIT))
    resident = max(1, min(tile.max_resident, device.max_shared_bytes // (tile.shared_bytes + 1024)))
    is_split = (
        memory is not None
        and memory.holds(tiles, tiles * chunks * tile.rows * tile.columns)
        and splitting_is_faster(tiles, chunks, device.num_multiprocessors * resident)
    )
    split = (memory.partials, memory.tickets) if memory is not None else (None, None)
    device.launch(
        _KERNELS[tile.rows, x.dtype],
        (tiles, chunks if is_split else 1, 1),
        (tile.threads, 1, 1),
        (
            *(codes, row_scales, weight, scales, bias, out, *split, num_rows, columns, depth),
            *(out.stride(0), units, int(out.dtype == torch.float32)),
        ),
        tile.shared_bytes,
    )
    return out


def _check_weight(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> None:
    if x.dtype not in SUFFIXES or x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise OperandError(
            f"x: {x.dtype}{list(x.shape)}, weight: {list(weight.shape)}; expected {' or '.join(map(str, SUFFIXES))}"
            " [num_rows, depth] and [columns, depth]"
        )
    depth, columns = x.shape[1], len(weight)
    if weight.dtype != FP8 or not weight.is_contiguous() or depth % PACK or weight.data_ptr() % 16:
        raise OperandError(
            f"weight: {weight.dtype}{list(weight.shape)}, strides {weight.stride()}; expected contiguous {FP8} with a depth"
            f" that is a multiple of {PACK}"
        )
    if scales.dtype != torch.float32 or scales.shape != (columns,) or not scales.is_contiguous():
        raise OperandError(
            f"scales: {scales.dtype}{list(scales.shape)}; expected contiguous torch.float32[{columns}]"
        )
