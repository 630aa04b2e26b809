"""Measure linear layers with packed weights, in each format and shape and with several numbers of rows.

    python -m bench.kernels.linear [--threads 2] [--formats bf16 int8 ...] [--rows 1 4 ...] [--save FILE]
    python -m bench.kernels.linear --threads 1 --processor-time     # on a machine with other load

The lower bound of a case's time is the larger of two times: a read of its packed weight, and its multiplications, both at the
machine's rates. The share is this bound divided by the measured time. Both limits vary, so they are
measured alternately with each case; the best repeat of each counts. The weights of a case have 256 MiB in total, so that they are
not in a cache; x and y are small and stay in one.

Multiply limits are rates of fp32 FMA for fp16 and fp32. For bf16 it is the fastest of fp32 FMA, dot products of pairs, and the
matrix unit. For integers it is dot products of bytes or the matrix unit; 16-bit activations need two products per weight. The
table names the instructions and the limit of the share.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bench.kernels.limits import Limits, Multiply
from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library, set_threads
from quintet.executor.backends.cpu.ops.host_linear import Inputs, LinearLibrary, WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.backends.cpu.ops.packed_tables import TABLE_SIZE, Outliers, fill_tables
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight

SHAPES = {
    "S qkv": (1152, 896),
    "S o": (896, 896),
    "S gate_up": (9728, 896),
    "S down": (896, 4864),
    "S head": (151_936, 896),
    "M qkv": (3072, 2048),
    "M o": (2048, 2048),
    "M gate_up": (16_384, 2048),
    "M down": (2048, 8192),
    "M head": (128_256, 2048),
}
"""Output and input dimensions of the layers of Qwen2.5-0.5B (S) and Llama-3.2-1B (M)."""

ROWS = (1, 4, 16, 32, 64, 256, 2048)
WEIGHT_BYTES = 1 << 28
GATHER_S = 10.0
"""Timeout for moving a weight to huge pages, as a server does in its idle time; prefetchers stop at page boundaries."""
LARGE_HEAD = 100_000
"""Output dimension from which large batches are left out, since no step computes that many logits."""
MAX_HEAD_ROWS = 64
LINE_BYTES = 64
SECONDS_PER_CALL = 0.05
"""Maximum duration of the calls between two measurements of the limits."""


@dataclass(frozen=True, slots=True)
class Format:
    """Format of weights and activations."""

    weight: WeightFormat
    group: int
    dtype: torch.dtype
    inputs: Inputs
    multiply: tuple[Multiply, ...]
    passes: int = 1
    """Products per weight."""
    outliers: float = 0.0
    """Share of outliers, for formats with tables."""

    @property
    def has_blocks(self) -> bool:
        """True if the weight is filled from blocks of a GGUF file."""
        return self.weight.has_own_group


PAIRS = (Multiply.FLOATS, Multiply.PAIRS, Multiply.MATRIX_PAIRS)
WIDE = Inputs.SIXTEEN_BITS
BYTES = (Multiply.BYTES, Multiply.MATRIX_BYTES)
FORMATS = {
    "bf16": Format(WeightFormat.BF16, 0, torch.bfloat16, WIDE, PAIRS),
    "fp16": Format(WeightFormat.FP16, 0, torch.float16, WIDE, (Multiply.FLOATS,)),
    "fp32": Format(WeightFormat.FP32, 0, torch.float32, WIDE, (Multiply.FLOATS,)),
    "int8": Format(WeightFormat.INT8, 0, torch.bfloat16, WIDE, BYTES, 2),
    "w8a8": Format(WeightFormat.INT8, 0, torch.bfloat16, Inputs.EIGHT_BITS, BYTES),
    "int4": Format(WeightFormat.INT4, 128, torch.bfloat16, WIDE, BYTES, 2),
    "gptq": Format(WeightFormat.INT4_ZEROS, 128, torch.bfloat16, WIDE, BYTES, 2),
    "hqq": Format(WeightFormat.INT4_SINGLE_ZEROS, 64, torch.bfloat16, WIDE, BYTES, 2),
    "nf4": Format(WeightFormat.NF4, 64, torch.bfloat16, WIDE, (Multiply.FLOATS,)),
    "squeezellm": Format(WeightFormat.TABLES, 0, torch.bfloat16, WIDE, (Multiply.FLOATS,), outliers=0.0045),
    "tables": Format(WeightFormat.TABLES, 0, torch.bfloat16, WIDE, (Multiply.FLOATS,)),
    "q8_0": Format(WeightFormat.INT8, 32, torch.bfloat16, WIDE, BYTES, 2),
    "q4_0": Format(WeightFormat.INT4, 32, torch.bfloat16, WIDE, BYTES, 2),
} | {
    name: Format(WeightFormat[name.upper()], 0, torch.bfloat16, WIDE, BYTES, 2)
    for name in ("q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4")
}
FORMATS |= {
    f"{name}+8": replace(each, inputs=Inputs.EIGHT_BITS_IN_GROUPS, passes=1)
    for name, each in FORMATS.items()
    if each.weight.is_integer and each.inputs is WIDE
}
"""+8: the same with ``--activation-dtype int8``."""
DEFAULTS = ("bf16", "fp16", "fp32", "int8", "w8a8", "int4")
"""Formats measured by default. Others: gptq and hqq (4 bits with integer or fp32 zero points), tables (one per output),
squeezellm (tables and outliers), nf4 (bitsandbytes), and those of GGUF files."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Result of a case, with the limits measured alternately with it."""

    format: str
    shape: str
    columns: int
    depth: int
    rows: int
    us: float
    gb_s: float
    read_limit_gb_s: float
    gop_s: float
    multiply_limit_gop_s: float
    multiply_limit: str
    """Instructions of the multiply limit."""
    share: float
    share_of: str
    """Limit of the share: reading, or the multiply instructions."""
    fill_gb_s: float


def source_of(chosen: Format, columns: int, depth: int) -> torch.Tensor:
    """Return random weights to quantize, or random blocks with small fp16 numbers as scales."""
    if chosen.weight.has_singles or chosen.weight.is_coded_float:
        return torch.randint(0, chosen.weight.code_levels or TABLE_SIZE, (columns, depth), dtype=torch.uint8)
    if not chosen.has_blocks:
        return torch.randn(columns, depth, dtype=torch.float32).to(torch.bfloat16)
    k, size = chosen.weight.block(0) or (1, 1)
    least = 0x60 if chosen.weight is WeightFormat.MXFP4 else 0  # exponents: no denormals
    return torch.randint(least, least + 0x3C, (columns, depth // k * size), dtype=torch.uint8)


def filler_of(chosen: Format, weight: PackedWeight) -> Callable[[torch.Tensor], None]:
    """Return the method that fills a weight from `source_of`."""
    if chosen.weight.has_tables:
        tables, outliers = (
            torch.randn(weight.columns, TABLE_SIZE),
            even_outliers(weight) if weight.outliers else None,
        )
        return partial(fill_tables, weight, tables=tables, outliers=outliers)
    if not chosen.weight.has_singles and not chosen.weight.is_coded_float:
        return weight.fill_blocks if chosen.has_blocks else weight.fill
    scales = torch.rand(weight.columns, -(-weight.depth // chosen.group)) * 0.01
    return partial(weight.fill_codes, scales=scales, zeros=scales * 1600 if chosen.weight.has_zeros else None)


def even_outliers(weight: PackedWeight) -> Outliers:
    """Return the maximum number of outliers of a weight, evenly distributed over rows and columns."""
    places = torch.arange(weight.outliers) * (weight.columns * weight.depth // weight.outliers)
    begins = torch.searchsorted(places, torch.arange(weight.columns + 1) * weight.depth)
    return Outliers(begins, places % weight.depth, torch.ones(weight.outliers))


def activations_of(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random activations with a row stride of an odd number of cache lines, as in a server."""
    between = LINE_BYTES // dtype.itemsize if depth * dtype.itemsize % (2 * LINE_BYTES) == 0 else 0
    return torch.randn(rows, depth + between).to(dtype)[:, :depth]


def measure(
    library: LinearLibrary, limits: Limits, name: str, shape: str, all_rows: list[int], repeats: int
) -> list[Timing]:
    """Measure one format and shape with each number of rows."""
    chosen, (columns, depth) = FORMATS[name], SHAPES[shape]
    source = source_of(chosen, columns, depth)
    weights, fill_s, size = list[PackedWeight](), list[float](), 0
    outliers = int(columns * depth * chosen.outliers)
    each = library.weight_bytes(int(chosen.weight), columns, depth, chosen.group, 0)
    each += library.weight_outlier_bytes(columns, depth, 0, outliers)
    described = partial(PackedWeight, library, chosen.weight, columns, depth, group=chosen.group)
    while size < WEIGHT_BYTES:
        pages = HugePages(each)
        weight = described(memory=pages.memory, outliers=outliers)
        fill = filler_of(chosen, weight)
        fill(source)  # a first fill maps the pages
        begun = time.perf_counter()
        if len(weights) < repeats:
            fill(source)
            fill_s.append(time.perf_counter() - begun)
        pages.gather(GATHER_S)
        weights.append(weight)
        size += each
    timings = []
    for rows in all_rows:
        if columns > LARGE_HEAD and rows > MAX_HEAD_ROWS:
            continue
        x = activations_of(rows, depth, chosen.dtype)
        y = torch.empty(rows, columns, dtype=chosen.dtype)
        operations = 2 * rows * columns * depth
        read, seconds = 0.0, float("inf")
        rates = dict.fromkeys(chosen.multiply, 0.0)
        count = len(weights)
        for _ in range(repeats):
            read = max(read, limits.read_gb_s())
            for kind in chosen.multiply:
                rates[kind] = max(rates[kind], limits.multiply_gop_s(kind))
            begun = limits.clock()
            for weight in weights[:count]:
                weight.linear(x, out=y, inputs=chosen.inputs)
            mine = (limits.clock() - begun) / count
            seconds = min(seconds, mine)
            if rows > 32:  # limited by multiplications: cold caches are not needed
                count = max(1, min(count, int(SECONDS_PER_CALL / mine)))
        fastest = max(rates, key=rates.__getitem__)
        multiply = rates[fastest]
        reading_s, multiplying_s = each / read / 1e9, operations * chosen.passes / multiply / 1e9
        timings.append(
            Timing(
                format=name,
                shape=shape,
                columns=columns,
                depth=depth,
                rows=rows,
                us=round(seconds * 1e6, 1),
                gb_s=round(each / seconds / 1e9, 1),
                read_limit_gb_s=round(read, 1),
                gop_s=round(operations / seconds / 1e9, 1),
                multiply_limit_gop_s=round(multiply / chosen.passes, 1),
                multiply_limit=fastest.words,
                share=round(max(reading_s, multiplying_s) / seconds, 3),
                share_of="reading" if reading_s > multiplying_s else fastest.words,
                fill_gb_s=round(source.nbytes / min(fill_s) / 1e9, 2),
            )
        )
    return timings


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure linear layers with packed weights.")
    parser.add_argument("--threads", type=int, default=2, help="threads of the kernels (default: 2)")
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(DEFAULTS), help="default: " + " ".join(DEFAULTS)
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="default: 1 to 2048")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure CPU time instead of wall time, for a machine with other load; needs --threads 1",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="repeats per case; the best counts (default: 5)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    arguments = parser.parse_args()
    opened, library = open_library(), linear_library()
    if opened is None or library is None:
        parser.error(
            "the host kernels are not built; install with a C++ compiler, or run `python setup.py build_ext`"
        )
    set_threads(opened, arguments.threads, False)
    if arguments.processor_time and arguments.threads != 1:
        parser.error(
            f"--processor-time measures one thread, but --threads is {arguments.threads}; pass --threads 1"
        )
    limits = Limits(opened, time.thread_time if arguments.processor_time else time.perf_counter)
    print(f"Instruction set {instruction_set(opened)}, {arguments.threads} threads.\n")
    print(
        "| format | shape | rows | µs | GB/s of bandwidth | GOP/s of multiply rate | share of limit | limit |"
    )
    print("|---|---|---|---|---|---|---|---|")
    timings = []
    for name in arguments.formats:
        for shape in arguments.shapes:
            if SHAPES[shape][1] % 256 and FORMATS[name].has_blocks:
                continue  # the row is not a multiple of the block size
            for t in measure(library, limits, name, shape, arguments.rows, arguments.repeats):
                timings.append(t)
                print(
                    f"| {name} | {shape} {t.columns}x{t.depth} | {t.rows} | {t.us:,.0f} | {t.gb_s} of {t.read_limit_gb_s} "
                    f"| {t.gop_s:,.0f} of {t.multiply_limit_gop_s:,.0f} ({t.multiply_limit}) | {t.share:.0%} | {t.share_of} |",
                    flush=True,
                )
    if arguments.save:
        record = {
            "command": "python -m bench.kernels.linear",
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.processor() or platform.machine(),
            "instruction_set": instruction_set(opened),
            "threads": arguments.threads,
            "processor_time": arguments.processor_time,
            "timings": [asdict(timing) for timing in timings],
        }
        arguments.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
