"""Who multiplies by a weight on a device: cuBLAS, or one of our kernels.

With ``--batch-invariant`` ours always do, in one order for any number of rows. Otherwise whoever was faster at boot (of
several ranks: at the first), for few rows, where reading the weight is all there is to it; cuBLAS for many. By codes one
kernel multiplies any number of rows. Owns that decision and what a split sum needs; does not know how kernels are launched
nor how time is taken, which is given.
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
from quintet.executor.backends.cuda.ops.linear import MATVEC_ROWS, SUFFIXES, SplitMemory, matmul, matvec
from quintet.executor.backends.cuda.ops.linear_coded import coded_matmul
from quintet.executor.backends.cuda.ops.linear_fp8 import fp8_matmul
from quintet.executor.backends.cuda.ops.linear_groups import head_matmul
from quintet.executor.backends.cuda.scaled_mm import ScaledMm
from quintet.executor.checkpoints.quant.coded import CodedLinear, CodedRun, Fp8Run
from quintet.executor.checkpoints.quant.none import RowMajorLinear
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.models.layers.head_linear import HeadLinear
from quintet.executor.models.layers.linear import Linear

log = logging.getLogger("quintet")

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows that are tried; one in between goes the way of the next larger one, a larger one to cuBLAS."""

ROTATION_BYTES = 512 << 20
"""Weights that are multiplied one after the other before the first comes again: several times any GPU's L2 (126 MB is the most
today), and long beside the microseconds that a graph takes to begin."""

MARGIN = 0.98
"""Ours are taken if they need at most this much of cuBLAS's time: within the noise, the library that many use is chosen."""

Stopwatch = Callable[[Callable[[], None]], float]
"""Runs a function's launches and returns the device's milliseconds."""


class GemmBackend(StrEnum):
    """Who multiplies."""

    CUBLAS = "cublas"
    MATMUL = "matmul"
    MATVEC = "matvec"


@dataclass(frozen=True, slots=True)
class WeightShape:
    """What a choice is made for."""

    columns: int
    depth: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightShape:
        """Return a weight's."""
        return cls(weight.shape[0], weight.shape[1], weight.dtype)

    def __str__(self) -> str:
        return f"{self.columns}x{self.depth} {SUFFIXES.get(self.dtype, self.dtype)}"


class DeviceLinears:
    """Multiplies by the weights of a model's layers. One stream at a time: it has one `SplitMemory`."""

    def __init__(self, device: Device, *, batch_invariant: bool) -> None:
        """Until `measure` is called, cuBLAS multiplies; with ``batch_invariant`` it never does."""
        self._device = device
        self._batch_invariant = batch_invariant
        self._memory = SplitMemory(device)
        self._ways: Mapping[WeightShape, Sequence[GemmBackend]] = {}
        self._scaled_mm = ScaledMm(device)

    def apply(self, layer: Linear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` ``[num_tokens, columns]`` of a layer; neither its activation nor a residual.

        x: ``[num_tokens, depth]``. In x's dtype or in the one that the layer's shape names.
        """
        dtype = layer.shape.result_dtype
        if out is None and dtype not in (None, x.dtype):
            out = x.new_empty(len(x), layer.columns, dtype=dtype)
        if isinstance(layer.method, CodedLinear):
            return self._by_part(layer.method, x, out)
        weight = layer.method.table
        assert weight is not None, (
            f"{layer.shape.parts}: packed for the host, not for {self._device.torch_device}"
        )
        return self.multiply(x, weight, layer.method.bias, out)

    def _by_part(self, method: CodedLinear, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Let each part write its columns."""
        if out is None:
            out = x.new_empty(len(x), sum(method.widths))
        for part, columns in zip(method.parts, out.split(method.widths, dim=1), strict=True):
            if isinstance(part, CodedRun):
                its = x if part.order is None else x.index_select(1, part.order)
                coded_matmul(self._device, its, part.weight, part.bias, columns, memory=self._memory)
            elif (
                isinstance(part, Fp8Run)
                and columns.dtype == x.dtype  # `_scaled_mm` with a scale for each row gives bf16 alone
                and self._scaled_mm.takes(part, x.shape[0], x.dtype)
            ):
                self._scaled_mm.multiply(x, part, columns)
            elif isinstance(part, Fp8Run):
                operands = (x, part.weight, part.scales, part.bias, columns)
                fp8_matmul(self._device, *operands, memory=self._memory)
            else:
                self.multiply(x, part.table, part.bias, columns)
        return out

    def by_head(self, layer: HeadLinear, x: torch.Tensor) -> torch.Tensor:
        """Return each head's columns of ``x`` through its own matrix."""
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
        """Return ``x @ weight.T + bias``; see `quintet.executor.backends.cuda.ops.linear.matmul`. out: in x's dtype,
        or float32.
        """
        return self._run(self.way(weight, x.shape[0]), x, weight, bias, out)

    def way(self, weight: torch.Tensor, num_rows: int) -> GemmBackend:
        """Return who multiplies so many rows by a weight."""
        if self._batch_invariant:
            return GemmBackend.MATMUL
        if num_rows <= MEASURED_ROWS[-1]:
            ways = self._ways.get(WeightShape.of(weight))
            if ways is not None:
                return next(way for rows, way in zip(MEASURED_ROWS, ways, strict=True) if num_rows <= rows)
        return GemmBackend.CUBLAS

    def measure(
        self, layers: Iterable[Linear], stopwatch: Stopwatch | None = None, ranks: Ranks | None = None
    ) -> None:
        """Choose, once weights are loaded: ten launches or so for each shape, kernel and number of rows, while nobody else uses
        the device.

        stopwatch: `captured_stopwatch` of the device where none is given. Does nothing with ``batch_invariant``. ranks: of
        one of several, which all call this: rank 0's choices are everybody's, since each way rounds in its own, and what
        every rank computes (routers, KV heads that several keep) has to have the same bits at all of them. The others choose
        for shapes that rank 0 does not have, as of the last part of a vocabulary: those are nobody else's numbers.
        """
        if self._batch_invariant:
            log.info("linear layers: our own kernels, as --batch-invariant asks")
            return
        layers = list(layers)
        self._scaled_mm.probe(_fp8_runs(layers))
        by_shape: dict[WeightShape, list[torch.Tensor]] = {}
        for layer in layers:
            for table in _tables(layer):
                by_shape.setdefault(WeightShape.of(table), []).append(table)
        if stopwatch is None:
            stopwatch = captured_stopwatch(self._device)
        known: Mapping[str, Sequence[GemmBackend]] = {}
        if ranks is None or ranks.share.rank == 0:
            known = {str(shape): self._fastest(weights, stopwatch) for shape, weights in by_shape.items()}
        if ranks is not None:
            told = ranks.as_first_says(msgspec.json.encode(known))
            known = msgspec.json.decode(told, type=dict[str, tuple[GemmBackend, ...]])
        self._ways = {
            shape: known.get(str(shape)) or self._fastest(weights, stopwatch)
            for shape, weights in by_shape.items()
        }
        log.info(
            "linear layers of %s rows: %s; more rows: cublas",
            ", ".join(map(str, MEASURED_ROWS)),
            "; ".join(f"{shape} {' '.join(ways)}" for shape, ways in self._ways.items()),
        )

    def _fastest(self, weights: Sequence[torch.Tensor], stopwatch: Stopwatch) -> tuple[GemmBackend, ...]:
        """Return who is fastest for each of `MEASURED_ROWS`; the weights are of one shape."""
        rotation = _rotation(weights)
        columns, depth = rotation[0].shape
        where = self._device.torch_device
        random = torch.Generator(where).manual_seed(0)  # nobody else's random numbers change
        chosen = []
        for num_rows in MEASURED_ROWS:
            x = torch.randn(num_rows, depth, device=where, generator=random).to(rotation[0].dtype)
            out = x.new_empty(num_rows, columns)
            times = {
                way: stopwatch(self._all_of(way, x, rotation, out))
                for way in _possible(rotation[0], num_rows)
            }
            best = min(times, key=lambda way: times[way])
            chosen.append(best if times[best] <= MARGIN * times[GemmBackend.CUBLAS] else GemmBackend.CUBLAS)
        return tuple(chosen)

    def _all_of(
        self, way: GemmBackend, x: torch.Tensor, weights: Sequence[torch.Tensor], out: torch.Tensor
    ) -> Callable[[], None]:
        def run() -> None:
            for weight in weights:
                self._run(way, x, weight, None, out)

        return run

    def _run(
        self,
        way: GemmBackend,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if way is GemmBackend.MATMUL:
            return matmul(self._device, x, weight, bias, out, memory=self._memory)
        if way is GemmBackend.MATVEC:
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
        """Let cuBLAS write sums as they are. On the emulator's processor torch widens the operands."""
        if x.device.type == "cuda":
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), weight.t().float(), out=out)
        return out if bias is None else out.add_(bias)


def _tables(layer: Linear) -> list[torch.Tensor]:
    """Return what of a layer's weight is in a number format: of that there is a choice."""
    if isinstance(layer.method, CodedLinear):
        return [part.table for part in layer.method.parts if isinstance(part, RowMajorLinear)]
    return [] if layer.method.table is None else [layer.method.table]


def _fp8_runs(layers: Iterable[Linear]) -> Iterator[Fp8Run]:
    """Yield the parts of layers that multiply fp8 by fp8."""
    for layer in layers:
        if isinstance(layer.method, CodedLinear):
            yield from (part for part in layer.method.parts if isinstance(part, Fp8Run))


def captured_stopwatch(device: Device, repeats: int = 7) -> Stopwatch:
    """Return what times launches on a device without the host's time for them: the median of a captured graph's replays."""

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
    """Return the first weights that together are larger than any cache; all, where that is not enough."""
    total = 0
    for count, weight in enumerate(weights, 1):
        total += weight.nbytes
        if total >= ROTATION_BYTES:
            return weights[:count]
    return weights


def _possible(weight: torch.Tensor, num_rows: int) -> tuple[GemmBackend, ...]:
    """Return who can multiply so many rows by a weight, cuBLAS first."""
    row_bytes = weight.shape[1] * weight.dtype.itemsize
    if weight.dtype not in SUFFIXES or row_bytes % 16 or weight.data_ptr() % 16 or not weight.is_contiguous():
        return (GemmBackend.CUBLAS,)
    ours = (GemmBackend.MATMUL, GemmBackend.MATVEC) if num_rows <= MATVEC_ROWS else (GemmBackend.MATMUL,)
    return (GemmBackend.CUBLAS, *ours)
