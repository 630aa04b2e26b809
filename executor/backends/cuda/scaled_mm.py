"""Products of e4m3 rows and e4m3 weights by ``torch._scaled_mm``, for steps of many rows.

The kernel of ours (`quintet.executor.backends.cuda.ops.linear_fp8`) multiplies with ``mma.sync``, which sm_90
executes for e4m3 by half of its bf16 rate or less; cuBLASLt and CUTLASS use wgmma there. Few rows are bound by
reading the weight, and stay ours. Bits depend on the batch, so ``--batch-invariant`` never uses this.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.linear_fp8 import SUFFIXES, fp8_matmul, fp8_quantize
from quintet.executor.checkpoints.quant.coded import Fp8Run

log = logging.getLogger("quintet")

LEAST_ROWS = 33
"""Up to 32 rows one tile of our kernel reads the weight once, at the rate of memory."""
PROBED_ROWS = 48
WIDTH_UNIT = 16
"""``_scaled_mm`` takes widths and depths that are multiples of this."""
MAX_DIFFERENCE = 2.0**-6
"""Between two results of the same codes and scales, of their largest magnitude: sums in another order, two roundings to bf16."""

Shape = tuple[int, int, torch.dtype]


class ScaledMm:
    """Registry of the weight shapes that ``torch._scaled_mm`` multiplies on this device; `probe` fills it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._works: dict[Shape, bool] = {}

    def probe(self, runs: Iterable[Fp8Run]) -> None:
        """Multiply random rows by one weight of each shape, and compare with our kernel. Logs what cannot be used."""
        for run in runs:
            for dtype in SUFFIXES:
                shape = (*run.weight.shape, dtype)
                if shape not in self._works:
                    self._works[shape] = self._agrees(run, dtype)

    def takes(self, run: Fp8Run, num_rows: int, dtype: torch.dtype) -> bool:
        """Return whether so many rows go this way."""
        return num_rows >= LEAST_ROWS and self._works.get((*run.weight.shape, dtype), False)

    def multiply(self, x: torch.Tensor, run: Fp8Run, out: torch.Tensor) -> None:
        """Write ``x @ (weight * scales).T + bias`` of x rounded to e4m3 into ``out [num_rows, columns]``."""
        codes, row_scales = fp8_quantize(self._device, x)
        y = torch._scaled_mm(
            codes,
            run.weight.t(),
            scale_a=row_scales[:, None],
            scale_b=run.scales[None, :],
            out_dtype=x.dtype,
        )
        out.copy_(y if run.bias is None else y.add_(run.bias))

    def _agrees(self, run: Fp8Run, dtype: torch.dtype) -> bool:
        columns, depth = run.weight.shape
        if columns % WIDTH_UNIT or depth % WIDTH_UNIT:
            return False
        where = self._device.torch_device
        random = torch.Generator(where).manual_seed(0)
        x = torch.randn(PROBED_ROWS, depth, device=where, generator=random).to(dtype)
        bias = None if run.bias is None else run.bias.to(dtype)
        found = x.new_empty(PROBED_ROWS, columns)
        try:
            self.multiply(x, run, found)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            log.info(
                "fp8 products of %dx%d %s: quintet (_scaled_mm: %s)",
                *(columns, depth, SUFFIXES[dtype], str(error).splitlines()[0]),
            )
            return False
        ours = fp8_matmul(self._device, x, run.weight, run.scales, bias)
        largest = float(ours.float().abs().max())
        difference = float((found.float() - ours.float()).abs().max())
        if difference > MAX_DIFFERENCE * largest:
            log.warning(
                "fp8 products of %dx%d %s: quintet (_scaled_mm differs by %.3g of %.3g)",
                *(columns, depth, SUFFIXES[dtype], difference, largest),
            )
            return False
        return True
