"""Linear layers on packed weights: each format and shape at several numbers of rows, beside the machine's limits.

    python -m bench.kernels.linear [--threads 2] [--formats bf16 int8 ...] [--rows 1 4 ...] [--save FILE]
    python -m bench.kernels.linear --threads 1 --processor-time     # where others use the machine

A case cannot take less time than reading its packed weight once at the machine's read bandwidth, nor less than its
multiplications at the machine's rate. Its share is the larger of these two times over its own. Both limits are measured
beside every case, in turn with it, because they drift; of each, the best of the repeats counts. Weights of one case
add up to 256 MiB, so that none is in a cache when its turn comes; x and y are small and are.

Multiply limits: fp32 FMA for fp16 and fp32; for bf16 that, the dot product of pairs or the matrix unit, whichever is fastest
here; for integers the dot product of bytes or the matrix unit, of which 16-bit activations need two for each weight. The table
says which it was, and which of the two limits, reading or multiplying, the share is of.
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
"""Outputs and inputs of the layers of Qwen2.5-0.5B (S) and Llama-3.2-1B (M)."""

ROWS = (1, 4, 16, 32, 64, 256, 2048)
WEIGHT_BYTES = 1 << 28
GATHER_S = 10.0
"""Limit on moving a weight to huge pages, which a server does while it is idle: prefetchers stop where a page ends."""
LARGE_HEAD = 100_000
"""Outputs from which large batches are left out: no step computes so many logits."""
MAX_HEAD_ROWS = 64
LINE_BYTES = 64
SECONDS_PER_CALL = 0.05
"""Limit on the total time of the calls between two measurements of the limits."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format and how its activations come."""

    weight: WeightFormat
    group: int
    dtype: torch.dtype
    inputs: Inputs
    multiply: tuple[Multiply, ...]
    passes: int = 1
    """Multiplications of the limit's kind that each weight takes."""
    outliers: float = 0.0
    """Share of outliers, next to tables."""

    @property
    def has_blocks(self) -> bool:
        """True if it is filled from blocks of a GGUF file."""
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
USUAL = ("bf16", "fp16", "fp32", "int8", "w8a8", "int4")
"""Formats measured by default. gptq, hqq: 4 bits with zero points, of bytes and of fp32; tables: those of
outputs, squeezellm: with outliers; nf4: bitsandbytes'; others are GGUF's."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One case; the limits are those measured beside it."""

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
    """Instructions that multiply at that rate."""
    share: float
    share_of: str
    """The limit that the share is of: reading, or what multiplies."""
    fill_gb_s: float


def source_of(chosen: Format, columns: int, depth: int) -> torch.Tensor:
    """Return weights to be quantized, or blocks of bytes that are small numbers of fp16 wherever they are scales."""
    if chosen.weight.has_singles or chosen.weight.is_coded_float:
        return torch.randint(0, chosen.weight.code_levels or TABLE_SIZE, (columns, depth), dtype=torch.uint8)
    if not chosen.has_blocks:
        return torch.randn(columns, depth, dtype=torch.float32).to(torch.bfloat16)
    k, size = chosen.weight.block(0) or (1, 1)
    least = 0x60 if chosen.weight is WeightFormat.MXFP4 else 0  # exponents: no denormals
    return torch.randint(least, least + 0x3C, (columns, depth // k * size), dtype=torch.uint8)


def filler_of(chosen: Format, weight: PackedWeight) -> Callable[[torch.Tensor], None]:
    """Return what fills a weight from `source_of`."""
    if chosen.weight.has_tables:
        tables, outliers = (
            torch.randn(weight.columns, TABLE_SIZE),
            evenly(weight) if weight.outliers else None,
        )
        return partial(fill_tables, weight, tables=tables, outliers=outliers)
    if not chosen.weight.has_singles and not chosen.weight.is_coded_float:
        return weight.fill_blocks if chosen.has_blocks else weight.fill
    scales = torch.rand(weight.columns, -(-weight.depth // chosen.group)) * 0.01
    return partial(weight.fill_codes, scales=scales, zeros=scales * 1600 if chosen.weight.has_zeros else None)


def evenly(weight: PackedWeight) -> Outliers:
    """Return as many outliers as a weight has room for, as far apart in each row as in any other."""
    places = torch.arange(weight.outliers) * (weight.columns * weight.depth // weight.outliers)
    begins = torch.searchsorted(places, torch.arange(weight.columns + 1) * weight.depth)
    return Outliers(begins, places % weight.depth, torch.ones(weight.outliers))


def activations_of(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random activations, their rows an odd number of cache lines apart where a server's are."""
    between = LINE_BYTES // dtype.itemsize if depth * dtype.itemsize % (2 * LINE_BYTES) == 0 else 0
    return torch.randn(rows, depth + between).to(dtype)[:, :depth]


def measure(
    library: LinearLibrary, limits: Limits, name: str, shape: str, all_rows: list[int], repeats: int
) -> list[Timing]:
    """Time one format and shape at every number of rows."""
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
        fill(source)  # the first time its pages are new
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
            if rows > 32:  # limited by multiplying: the weights need not be new
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
    parser = argparse.ArgumentParser(description="Time linear layers on packed weights.")
    parser.add_argument("--threads", type=int, default=2, help="threads of the kernels (default: 2)")
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(USUAL), help="default: " + " ".join(USUAL)
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="default: 1 to 2048")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count what the processor worked, not what passed: on a machine that others use; needs --threads 1",
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each case, the best counts (default: 5)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON too")
    arguments = parser.parse_args()
    opened, library = open_library(), linear_library()
    if opened is None or library is None:
        parser.error(
            "the host kernels are not built; install with a C++ compiler, or run `python setup.py build_ext`"
        )
    set_threads(opened, arguments.threads, False)
    if arguments.processor_time and arguments.threads != 1:
        parser.error(
            f"--processor-time counts one thread's; --threads is {arguments.threads}: give --threads 1"
        )
    limits = Limits(opened, time.thread_time if arguments.processor_time else time.perf_counter)
    print(f"Instruction set {instruction_set(opened)}, {arguments.threads} threads.\n")
    print(
        "| format | shape | rows | µs | GB/s of read | GOP/s of multiply | share of what limits | which is |"
    )
    print("|---|---|---|---|---|---|---|---|")
    timings = []
    for name in arguments.formats:
        for shape in arguments.shapes:
            if SHAPES[shape][1] % 256 and FORMATS[name].has_blocks:
                continue  # not whole blocks
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
