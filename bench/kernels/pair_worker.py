"""Measure the linear layers of one checkout on request; `bench.kernels.pairs` runs one such process for each of two checkouts.

The module also runs with the code of other checkouts. So it imports nothing of `bench`, and from quintet only what all checkouts
since 43aa0b4 have. A line of stdin is a `Case` as JSON, to load its weights, or a number of rows. It prints an `Answer` for
each.
"""

from __future__ import annotations

import mmap
import sys
import time
import zlib
from typing import Any

import msgspec
import torch

from quintet.executor.backends.cpu.ops.host_library import open_library, set_threads
from quintet.executor.backends.cpu.ops.host_linear import WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight

PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25


class Case(msgspec.Struct):
    """Weights of one shape, with at least `bytes` in total."""

    format: str
    columns: int
    depth: int
    group: int
    inputs: int
    bytes: int
    threads: int
    row_bytes: int = 0
    """Bytes of a row of GGUF blocks, for formats that are filled from blocks; else 0."""


class Answer(msgspec.Struct):
    """Mean time of a weight's product in seconds, and a checksum of the results."""

    seconds: float
    bits: int


def allocate_on_huge_pages(size: int) -> torch.Tensor:
    """Return ``uint8[size]`` on huge pages, which some checkouts do not use for weights."""
    length = -(-size // PAGE_BYTES) * PAGE_BYTES
    mapped = mmap.mmap(-1, length + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE_BYTES
    mapped.madvise(mmap.MADV_HUGEPAGE, begin, length)
    memory = whole[begin : begin + size]
    memory.fill_(0)
    mapped.madvise(MADV_COLLAPSE, begin, length)
    return memory


def load(case: Case) -> list[PackedWeight]:
    """Return the weights of a case, which all have the same numbers."""
    library = linear_library()
    assert library is not None, "the host kernels are not built"
    torch.manual_seed(0)
    if case.row_bytes:  # small bytes, so that scales are small numbers
        source = torch.randint(0, 0x3C, (case.columns, case.row_bytes), dtype=torch.uint8)
        if case.format == "MXFP4":
            source[:, ::17] += 64  # exponents of scales; denormal numbers would be slow
    else:
        source = torch.randn(case.columns, case.depth).to(torch.bfloat16)
    kind = WeightFormat[case.format]
    size = library.weight_bytes(int(kind), case.columns, case.depth, case.group, 0)
    weights: list[PackedWeight] = []
    while not weights or len(weights) * size < case.bytes:
        weight = PackedWeight(
            library, kind, case.columns, case.depth, group=case.group, memory=allocate_on_huge_pages(size)
        )
        if weights:
            weight.memory.copy_(weights[0].memory)
        else:
            (weight.fill_blocks if case.row_bytes else weight.fill)(source)
        weights.append(weight)
    return weights


def run(case: Case, weights: list[PackedWeight], rows: int) -> Answer:
    """Multiply by each weight once, or by a single weight thirty times."""
    torch.manual_seed(rows)
    x = torch.randn(rows, case.depth).to(torch.bfloat16)
    y = torch.empty(rows, case.columns, dtype=torch.bfloat16)
    clock = time.thread_time if case.threads == 1 else time.perf_counter
    passes = weights if len(weights) > 1 else weights * 30
    arguments: tuple[Any, ...] = (
        x,
        None,
        None,
        y,
        GatedActivation.NONE,
        case.inputs,
    )  # arguments of older checkouts too
    weights[-1].linear(*arguments)
    begin_s = clock()
    for weight in passes:
        weight.linear(*arguments)
    seconds = (clock() - begin_s) / len(passes)
    return Answer(seconds, zlib.crc32(y.view(torch.uint8).numpy().tobytes()))


def main() -> None:
    """Handle lines of stdin until it ends."""
    opened = open_library()
    assert opened is not None, "the host kernels are not built"
    case: Case | None = None
    weights: list[PackedWeight] = []
    for line in sys.stdin:
        if line.startswith("{"):
            weights.clear()
            case = msgspec.json.decode(line, type=Case)
            set_threads(opened, case.threads, False)
            weights = load(case)
            answer = Answer(0.0, 0)
        else:
            assert case is not None, "the first line must be a case"
            answer = run(case, weights, int(line))
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
