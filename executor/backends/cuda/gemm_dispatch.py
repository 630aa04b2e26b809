"""GEMM dispatch: selects cuBLAS or one of our kernels per weight shape and number of rows.

- ``--batch-invariant``: our matmul for every number of rows, with one order of summation.
- Otherwise, up to 64 rows (bound by reading the weight): the fastest by measurement at startup; rank 0 decides for all ranks.
  More rows: cuBLAS.
- Coded weights: one kernel for any number of rows.

Owns the decision and the memory of split sums.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import torch
import torch.nn.functional as F

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.formats import SUFFIXES
from quintet.executor.backends.cuda.ops.linear import MATVEC_ROWS, SplitMemory, matmul, matvec
from quintet.executor.backends.cuda.ops.linear_coded import coded_matmul
from quintet.executor.backends.cuda.ops.linear_fp8 import fp8_matmul
from quintet.executor.backends.cuda.ops.linear_groups import head_matmul
from quintet.executor.backends.cuda.scaled_mm import ScaledMm
from quintet.executor.checkpoints.quant.coded import CodedLinear, CodedRun, Fp8Run
from quintet.executor.checkpoints.quant.packed import RowMajorLinear
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.models.layers.linear import HeadLinear, Linear

log = logging.getLogger("quintet")

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Measured numbers of rows. A number in between uses the backend of the next larger one; a larger number uses cuBLAS."""

ROTATION_BYTES = 512 << 20
"""Size of the set of weights that a measurement cycles through. It is several times the largest L2 cache (126 MB), and takes
long compared with the start of a graph (microseconds)."""

MARGIN = 0.98
"""Our kernel is selected if it takes at most this fraction of cuBLAS's time; within noise, cuBLAS is selected."""

Stopwatch = Callable[[Callable[[], None]], float]
"""Runs a function's launches and returns the device time in milliseconds."""


class GemmBackend(StrEnum):
    """Implementation of a matrix multiplication."""

    CUBLAS = "cublas"
    MATMUL = "matmul"
    MATVEC = "matvec"


@dataclass(frozen=True, slots=True)
class WeightShape:
    """Key of a dispatch decision."""

    columns: int
    depth: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightShape:
        return cls(weight.shape[0], weight.shape[1], weight.dtype)

    def __str__(self) -> str:
        return f"{self.columns}x{self.depth} {SUFFIXES.get(self.dtype, self.dtype)}"


class DeviceLinears:
    """Multiplies by the weights of a model's layers. Use it on one stream at a time, because it has one `SplitMemory`."""

    def __init__(self, device: Device, *, batch_invariant: bool) -> None:
        """Uses cuBLAS until `measure` is called; never with ``batch_invariant``."""
        self._device = device
        self._batch_invariant = batch_invariant
        self._memory = SplitMemory(device)
        self._backends: Mapping[WeightShape, Sequence[GemmBackend]] = {}
        self._scaled_mm = ScaledMm(device)

    def apply(self, layer: Linear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` ``[num_tokens, columns]`` of a layer, without activation and residual.

        x: ``[num_tokens, depth]``. The result has the dtype of the layer's shape, by default that of x.
        """
        dtype = layer.shape.result_dtype
        if out is None and dtype not in (None, x.dtype):
            out = x.new_empty(len(x), layer.columns, dtype=dtype)
        if isinstance(layer.method, CodedLinear):
            return self._by_part(layer.method, x, out)
        weight = layer.method.table
        assert weight is not None, (
            f"{layer.shape.parts}: the weight is packed for the CPU, not for {self._device.torch_device}"
        )
        return self.multiply(x, weight, layer.method.bias, out)

    def _by_part(self, method: CodedLinear, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Multiply each part into its columns of ``out``."""
        if out is None:
            out = x.new_empty(len(x), sum(method.widths))
        for part, columns in zip(method.parts, out.split(method.widths, dim=1), strict=True):
            if isinstance(part, CodedRun):
                inputs = x if part.order is None else x.index_select(1, part.order)
                coded_matmul(self._device, inputs, part.weight, part.bias, columns, memory=self._memory)
            elif (
                isinstance(part, Fp8Run)
                and columns.dtype == x.dtype  # `_scaled_mm` with a scale per row only returns bf16
                and self._scaled_mm.supports(part, x.shape[0], x.dtype)
            ):
                self._scaled_mm.multiply(x, part, columns)
            elif isinstance(part, Fp8Run):
                operands = (x, part.weight, part.scales, part.bias, columns)
                fp8_matmul(self._device, *operands, memory=self._memory)
            else:
                self.multiply(x, part.table, part.bias, columns)
        return out

    def head_linear(self, layer: HeadLinear, x: torch.Tensor) -> torch.Tensor:
        """Multiply each head's columns of ``x`` by the head's matrix."""
        if not self._batch_invariant:
            return layer(x)
        assert layer.method.table is not None
        return head_matmul(self._device, x, layer.method.table)

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``x @ weight.T + bias``; see `quintet.executor.backends.cuda.ops.linear.matmul`. out: x's dtype or float32."""
        return self._run(self.backend_for(weight, x.shape[0]), x, weight, bias, out)

    def backend_for(self, weight: torch.Tensor, num_rows: int) -> GemmBackend:
        if self._batch_invariant:
            return GemmBackend.MATMUL
        if num_rows <= MEASURED_ROWS[-1]:
            backends = self._backends.get(WeightShape.of(weight))
            if backends is not None:
                return next(
                    backend for rows, backend in zip(MEASURED_ROWS, backends, strict=True) if num_rows <= rows
                )
        return GemmBackend.CUBLAS

    def measure(
        self, layers: Iterable[Linear], stopwatch: Stopwatch | None = None, ranks: Ranks | None = None
    ) -> None:
        """Measure about ten launches per shape, kernel and number of rows, and select the backends.

        Call it once weights are loaded and while the device is idle. No-op with ``batch_invariant``.

        stopwatch: by default `captured_stopwatch`. ranks: given if there are several ranks, which all call this. All ranks use
        rank 0's selection: backends round differently, and replicated results (routers, replicated KV heads) must have the same
        bits on every rank. A rank selects by itself for shapes that rank 0 lacks, such as the last vocabulary shard.
        """
        if self._batch_invariant:
            log.info("linear layers: our kernels (--batch-invariant)")
            return
        layers = list(layers)
        self._scaled_mm.probe(_fp8_runs(layers))
        by_shape: dict[WeightShape, list[torch.Tensor]] = {}
        for layer in layers:
            for table in _tables(layer):
                by_shape.setdefault(WeightShape.of(table), []).append(table)
        if stopwatch is None:
            stopwatch = captured_stopwatch(self._device)
        selected: Mapping[str, Sequence[GemmBackend]] = {}
        if ranks is None or ranks.share.rank == 0:
            selected = {str(shape): self._fastest(weights, stopwatch) for shape, weights in by_shape.items()}
        if ranks is not None:
            received = ranks.broadcast_from_first(msgspec.json.encode(selected))
            selected = msgspec.json.decode(received, type=dict[str, tuple[GemmBackend, ...]])
        self._backends = {
            shape: selected.get(str(shape)) or self._fastest(weights, stopwatch)
            for shape, weights in by_shape.items()
        }
        log.info(
            "linear layers of %s rows: %s; more rows: cublas",
            ", ".join(map(str, MEASURED_ROWS)),
            "; ".join(f"{shape} {' '.join(backends)}" for shape, backends in self._backends.items()),
        )

    def _fastest(self, weights: Sequence[torch.Tensor], stopwatch: Stopwatch) -> tuple[GemmBackend, ...]:
        """Return the fastest backend for each of `MEASURED_ROWS`; the weights have one shape."""
        rotation = _rotation(weights)
        columns, depth = rotation[0].shape
        torch_device = self._device.torch_device
        random = torch.Generator(torch_device).manual_seed(0)  # leaves the global generator unchanged
        selected = []
        for num_rows in MEASURED_ROWS:
            x = torch.randn(num_rows, depth, device=torch_device, generator=random).to(rotation[0].dtype)
            out = x.new_empty(num_rows, columns)
            times = {
                backend: stopwatch(self._products(backend, x, rotation, out))
                for backend in _candidates(rotation[0], num_rows)
            }
            best = min(times, key=lambda backend: times[backend])
            selected.append(best if times[best] <= MARGIN * times[GemmBackend.CUBLAS] else GemmBackend.CUBLAS)
        return tuple(selected)

    def _products(
        self, backend: GemmBackend, x: torch.Tensor, weights: Sequence[torch.Tensor], out: torch.Tensor
    ) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                self._run(backend, x, weight, None, out)

        return run

    def _run(
        self,
        backend: GemmBackend,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if backend is GemmBackend.MATMUL:
            return matmul(self._device, x, weight, bias, out, memory=self._memory)
        if backend is GemmBackend.MATVEC:
            return matvec(self._device, x, weight, bias, out)
        if out is None:
            return F.linear(x, weight, bias)
        if out.dtype != x.dtype:
            return self._in_float32(x, weight, bias, out)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def _in_float32(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply with unrounded float32 sums in ``out``. On the emulator's CPU, torch widens the operands."""
        if x.device.type == "cuda":
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), weight.t().float(), out=out)
        return out if bias is None else out.add_(bias)


def _tables(layer: Linear) -> list[torch.Tensor]:
    """Return the tables of a layer's weight that are not quantized; only these have several backends."""
    if isinstance(layer.method, CodedLinear):
        return [part.table for part in layer.method.parts if isinstance(part, RowMajorLinear)]
    return [] if layer.method.table is None else [layer.method.table]


def _fp8_runs(layers: Iterable[Linear]) -> Iterator[Fp8Run]:
    """Yield the fp8 parts of the layers."""
    for layer in layers:
        if isinstance(layer.method, CodedLinear):
            yield from (part for part in layer.method.parts if isinstance(part, Fp8Run))


def captured_stopwatch(device: Device, repeats: int = 7) -> Stopwatch:
    """Return a stopwatch that excludes host time: the median device time of a captured graph's replays."""

    def captured_ms(run: Callable[[], None]) -> float:
        replay = device.capture_timing(run)
        replay()
        times = []
        for _ in range(repeats):
            begin = device.record()
            replay()
            end = device.record()
            end.wait()
            times.append(end.elapsed_ms(begin))
        return statistics.median(times)

    return captured_ms


def _rotation(weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the first weights that together exceed every cache, or all of them."""
    total = 0
    for count, weight in enumerate(weights, 1):
        total += weight.nbytes
        if total >= ROTATION_BYTES:
            return weights[:count]
    return weights


def _candidates(weight: torch.Tensor, num_rows: int) -> tuple[GemmBackend, ...]:
    """Return the backends that support a weight and a number of rows, cuBLAS first."""
    row_bytes = weight.shape[1] * weight.dtype.itemsize
    if weight.dtype not in SUFFIXES or row_bytes % 16 or weight.data_ptr() % 16 or not weight.is_contiguous():
        return (GemmBackend.CUBLAS,)
    ours = (GemmBackend.MATMUL, GemmBackend.MATVEC) if num_rows <= MATVEC_ROWS else (GemmBackend.MATMUL,)
    return (GemmBackend.CUBLAS, *ours)
