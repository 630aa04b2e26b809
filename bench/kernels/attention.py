"""Measure paged attention for decode and prefill: time, and share of the machine's bandwidth and multiply rate.

    python -m bench.kernels.attention [--threads 2] [--repeats 9] [--save FILE]

Each case has so many layers of scattered blocks that the processor's caches are cold in each repeat: 1 GiB in total, for decode
and draft verification 1 GiB of KV. The limits are measured between repeats with the same threads (`bench.kernels.limits`): read
bandwidth, and the multiply rate in registers. That is the rate of fp32 FMA; for bf16 also of dot products or the matrix unit, if
faster. The table names the instructions. Results are medians; shares are ratios of medians of the same case.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.kernels.limits import Limits, Multiply
from quintet.executor.backends.cpu.ops.host_attention import PagedKv, c_attention, write_kv
from quintet.executor.backends.cpu.ops.host_dtypes import DTYPE_CODES
from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library, set_threads
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import CStep, KvPlace
from quintet.executor.memory import lazy_zeros
from quintet.executor.models.layers.attention import AttentionLayer

BLOCK_SIZE = 16
TOTAL_BYTES = 1 << 30
FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "int4": torch.quint4x2,
}


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of equal length, with ``cached`` tokens and ``new`` query tokens."""

    rows: int
    cached: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    @property
    def layer(self) -> AttentionLayer:
        """The attention layer of this case."""
        return AttentionLayer(
            index=0,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
        )

    @property
    def multiply(self) -> tuple[Multiply, ...]:
        """Kinds of multiply instructions; the limit is the fastest one."""
        if self.dtype != "bf16":
            return (Multiply.FLOATS,)
        if self.kv_dtype == "bf16":
            return (Multiply.FLOATS, Multiply.PAIRS, Multiply.MATRIX_PAIRS)
        return (Multiply.FLOATS, Multiply.MATRIX_PAIRS)


S, M, WIDE = (14, 2, 64), (32, 8, 64), (16, 8, 128)
"""Heads, KV heads and head dimension of Qwen2.5-0.5B, of Llama-3.2-1B and of a larger model."""

DRAFT_TOKENS = 9
"""Query tokens of a row that verifies eight drafts."""

CASES = (
    *(Case(16, 1023, 1, *shape) for shape in (S, M, WIDE)),
    *(Case(16, 1023, 1, *shape, kv_dtype=narrow) for narrow in ("int8", "int4") for shape in (S, M, WIDE)),
    *(Case(1, 16_383, 1, *WIDE, kv_dtype=kv_dtype) for kv_dtype in ("bf16", "int8", "int4")),
    *(Case(1, 8183, DRAFT_TOKENS, *shape) for shape in (S, M)),
    Case(1, 1023, 1, *S),
    Case(1, 127, 1, *M),
    Case(32, 300, 1, *S),
    Case(16, 1023, 1, *S, "fp16", "fp16"),
    Case(16, 1023, 1, *S, "fp32", "fp32"),
    *(Case(1, 0, 2048, *shape) for shape in (S, M, WIDE)),
    *(Case(1, 0, 2048, *S, kv_dtype=narrow) for narrow in ("int8", "int4")),
    Case(8, 0, 256, *S),
    Case(1, 1024, 512, *M),
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Result of a case. Reads count each row's KV once; multiplications count pairs that the causal mask allows."""

    case: Case
    layer_us: float
    read_gb_s: float
    gflop_s: float
    limit_read_gb_s: float
    limit_gflop_s: float
    limit_of: str
    """Instructions of the multiply limit."""

    @property
    def read_share(self) -> float:
        """Share of the machine's read bandwidth."""
        return self.read_gb_s / self.limit_read_gb_s

    @property
    def multiply_share(self) -> float:
        """Share of the machine's multiply rate."""
        return self.gflop_s / self.limit_gflop_s


class Layers:
    """A recorded program with the layers of a case, and one step."""

    def __init__(self, library: ProgramLibrary, case: Case) -> None:
        self._library = library
        dtype, kv_dtype = FORMATS[case.dtype], FORMATS[case.kv_dtype]
        columns = -(-(case.cached + case.new) // BLOCK_SIZE)
        num_blocks = columns * case.rows
        shape = (kv_dtype, case.kv_heads, case.head_dim, BLOCK_SIZE)
        first = PagedKv.of_blocks(num_blocks, *shape)
        self.cache_bytes = first.memory.numel()
        self.count = max(1, TOTAL_BYTES // self.cache_bytes) if case.new <= DRAFT_TOKENS else 2
        table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(case.rows, columns)
        self._fill(first, table, case, dtype)
        memory = [first.memory]
        for _ in range(1, self.count):  # reserved as in a server, on huge pages if available
            memory.append(lazy_zeros(tuple(first.memory.shape), torch.uint8, torch.device("cpu")))
            memory[-1].copy_(first.memory)
        self.step, self._columns = step_of(table, case.cached, case.new)
        q = torch.randn(case.rows * case.new, case.heads * case.head_dim).to(dtype)
        out = torch.empty_like(q)
        self._kept = (memory, table, q, out)
        self._program = library.new()
        described = c_attention(case.layer, dtype, DTYPE_CODES[kv_dtype], BLOCK_SIZE)
        for layer in memory:
            place = KvPlace(layer.data_ptr(), layer.stride(0), 0, 1, 0, 0)
            library.attention(
                *(self._program, ctypes.byref(described), q.data_ptr(), q.stride(0), ctypes.byref(place)),
                *(out.data_ptr(), out.stride(0), len(q)),
            )
        self._size = library.size(self._program)

    def _fill(
        self,
        kv: PagedKv,
        table: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
        case: Case,
        dtype: torch.dtype,
    ) -> None:
        length = case.cached + case.new
        step, columns = step_of(table, 0, length)
        q, k, v = (
            torch.randn(case.rows * length, heads * case.head_dim).to(dtype)
            for heads in (case.heads, case.kv_heads, case.kv_heads)
        )
        write_kv(step, case.layer, q, k, v, kv)
        assert columns is not None

    def run(self) -> None:
        """Compute each layer once."""
        self._library.run(self._program, ctypes.byref(self.step), 0, self._size)

    def close(self) -> None:
        """Free the program."""
        self._library.delete(self._program)


def step_of(
    table: np.ndarray[tuple[int, ...], np.dtype[np.int32]], start: int, count: int
) -> tuple[CStep, object]:
    """Return a step with ``count`` tokens from position ``start`` for each row, and the arrays that it points to."""
    rows = np.arange(len(table), dtype=np.int64)
    starts, counts = np.full(len(rows), start, np.int64), np.full(len(rows), count, np.int64)
    offsets = rows * count
    step = CStep(
        num_tokens=len(rows) * count,
        num_rows=len(rows),
        row_slots=rows.ctypes.data,
        row_starts=starts.ctypes.data,
        row_counts=counts.ctypes.data,
        row_offsets=offsets.ctypes.data,
        block_table=table.ctypes.data,
        block_table_stride=table.shape[1],
    )
    return step, (rows, starts, counts, offsets)


def measure(library: ProgramLibrary, limits: Limits, case: Case, repeats: int) -> Timing:
    """Measure a case and the machine's limits alternately."""
    layers = Layers(library, case)
    layers.run()
    spent, reading = [], []
    multiplying: dict[Multiply, list[float]] = {kind: [] for kind in case.multiply}
    for _ in range(repeats):
        reading.append(limits.read_gb_s())
        for kind, rates in multiplying.items():
            rates.append(limits.multiply_gop_s(kind))
        begun = time.perf_counter()
        layers.run()
        spent.append(time.perf_counter() - begun)
    layer = statistics.median(spent) / layers.count
    layers.close()
    limit, fastest = max((statistics.median(rates), kind) for kind, rates in multiplying.items())
    pairs = case.rows * sum(case.cached + i + 1 for i in range(case.new))
    return Timing(
        case=case,
        layer_us=round(layer * 1e6, 1),
        read_gb_s=round(layers.cache_bytes / layer / 1e9, 1),
        gflop_s=round(4 * pairs * case.heads * case.head_dim / layer / 1e9, 1),
        limit_read_gb_s=round(statistics.median(reading), 1),
        limit_gflop_s=round(limit, 1),
        limit_of=fastest.words,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Measure paged attention compared with the machine's limits."
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of the kernels and of the limits (default: 2)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each case (default: 9)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    arguments = parser.parse_args()
    library = open_library()
    if library is None:
        parser.error(
            "the host kernels are not built; install with a C++ compiler, or run `python setup.py build_ext`"
        )
    set_threads(library, arguments.threads, pinned=False)
    limits = Limits(library)
    isa = instruction_set(library)
    print(f"{platform.processor() or platform.machine()}, {isa}, {arguments.threads} threads")
    print("rows cached  new  heads     numbers      us/layer   GB/s (share)  GFLOP/s (share of)")
    timings = []
    for case in CASES:
        timing = measure(ProgramLibrary(library), limits, case, arguments.repeats)
        timings.append(timing)
        heads = f"{case.heads}/{case.kv_heads} x {case.head_dim}"
        numbers = case.dtype if case.dtype == case.kv_dtype else f"{case.dtype}, KV {case.kv_dtype}"
        print(
            f"{case.rows:>4} {case.cached:>6} {case.new:>4}  {heads:<10} {numbers:<13}"
            f"{timing.layer_us:>9.1f} {timing.read_gb_s:>6.1f} ({timing.read_share:4.0%})"
            f"  {timing.gflop_s:>6.1f} ({timing.multiply_share:4.0%} of {timing.limit_of})",
            flush=True,
        )
    if arguments.save:
        report = {
            "instruction_set": isa,
            "threads": arguments.threads,
            "torch": torch.__version__,
            "timings": [asdict(each) for each in timings],
        }
        arguments.save.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
