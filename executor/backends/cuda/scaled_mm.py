"""fp8 (e4m3) products by ``torch._scaled_mm``, for steps of many rows.

Our kernel (`quintet.executor.backends.cuda.ops.linear_fp8`) uses ``mma.sync``, which runs e4m3 on sm_90 at half of the bf16 rate
or less; cuBLASLt and CUTLASS use wgmma. Few rows are bound by reading the weight, so our kernel computes them. Bits depend on the
batch, so ``--batch-invariant`` excludes ``_scaled_mm``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.linear_fp8 import SUFFIXES, fp8_matmul, fp8_quantize
from quintet.executor.checkpoints.quant.coded import Fp8Run

log = logging.getLogger("quintet")

MIN_ROWS = 33
"""Minimum number of rows. Up to 32 rows, one tile of our kernel reads the weight once at memory bandwidth."""
PROBED_ROWS = 48
WIDTH_UNIT = 16
"""``_scaled_mm`` needs widths and depths that are multiples of this."""
MAX_DIFFERENCE = 2.0**-6
"""Allowed difference of two results, relative to the largest magnitude: another order of sums, two roundings to bf16."""

Shape = tuple[int, int, torch.dtype]


class ScaledMm:
    """Weight shapes that ``torch._scaled_mm`` supports on this device; `probe` fills it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._works: dict[Shape, bool] = {}

    def probe(self, runs: Iterable[Fp8Run]) -> None:
        """Compare with our kernel on random rows, once per weight shape. Logs unusable shapes."""
        for run in runs:
            for dtype in SUFFIXES:
                shape = (*run.weight.shape, dtype)
                if shape not in self._works:
                    self._works[shape] = self._agrees(run, dtype)

    def supports(self, run: Fp8Run, num_rows: int, dtype: torch.dtype) -> bool:
        """Return whether to use ``_scaled_mm`` for this weight and number of rows."""
        return num_rows >= MIN_ROWS and self._works.get((*run.weight.shape, dtype), False)

    def multiply(self, x: torch.Tensor, run: Fp8Run, out: torch.Tensor) -> None:
        """Quantize x to e4m3 and write ``x @ (weight * scales).T + bias`` to ``out [num_rows, columns]``."""
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
        torch_device = self._device.torch_device
        random = torch.Generator(torch_device).manual_seed(0)
        x = torch.randn(PROBED_ROWS, depth, device=torch_device, generator=random).to(dtype)
        bias = None if run.bias is None else run.bias.to(dtype)
        actual = x.new_empty(PROBED_ROWS, columns)
        try:
            self.multiply(x, run, actual)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            log.info(
                "fp8 products of %dx%d %s: quintet (_scaled_mm: %s)",
                *(columns, depth, SUFFIXES[dtype], str(error).splitlines()[0]),
            )
            return False
        ours = fp8_matmul(self._device, x, run.weight, run.scales, bias)
        largest = float(ours.float().abs().max())
        difference = float((actual.float() - ours.float()).abs().max())
        if difference > MAX_DIFFERENCE * largest:
            log.warning(
                "fp8 products of %dx%d %s: quintet (_scaled_mm differs by %.3g of %.3g)",
                *(columns, depth, SUFFIXES[dtype], difference, largest),
            )
            return False
        return True
