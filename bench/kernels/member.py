"""One checkout's linear layers, timed on request: `bench.kernels.pairs` runs two of these.

Imports nothing of `bench`, and of quintet what every checkout since 43aa0b4 has: it runs with another one's. A line of standard
input is a `Case` as JSON, which is answered by a line once its weights lie there, or a number of rows, answered by an `Answer`.
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
    """Weights of one shape, as many as there are `bytes`, at least one."""

    format: str
    columns: int
    depth: int
    group: int
    inputs: int
    bytes: int
    threads: int
    row_bytes: int = 0
    """Of rows of a GGUF file's blocks, where the format takes nothing else."""


class Answer(msgspec.Struct):
    """Time of one pass over all weights, for each; and a checksum of the results."""

    seconds: float
    bits: int


def huge(size: int) -> torch.Tensor:
    """Return ``uint8[size]`` on huge pages, which not every checkout's weights are by themselves."""
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
    """Return the case's weights, all the same numbers."""
    library = linear_library()
    assert library is not None, "the host kernels are built"
    torch.manual_seed(0)
    if case.row_bytes:  # small numbers wherever they are scales
        source = torch.randint(0, 0x3C, (case.columns, case.row_bytes), dtype=torch.uint8)
        if case.format == "MXFP4":
            source[:, ::17] += 64  # exponents of scales: denormal numbers are slow
    else:
        source = torch.randn(case.columns, case.depth).to(torch.bfloat16)
    kind = WeightFormat[case.format]
    size = library.weight_bytes(int(kind), case.columns, case.depth, case.group, 0)
    weights: list[PackedWeight] = []
    while not weights or len(weights) * size < case.bytes:
        weight = PackedWeight(library, kind, case.columns, case.depth, group=case.group, memory=huge(size))
        if weights:
            weight.memory.copy_(weights[0].memory)
        else:
            (weight.fill_blocks if case.row_bytes else weight.fill)(source)
        weights.append(weight)
    return weights


def run(case: Case, weights: list[PackedWeight], rows: int) -> Answer:
    """Multiply by each weight once, and if there is one by it thirty times."""
    torch.manual_seed(rows)
    x = torch.randn(rows, case.depth).to(torch.bfloat16)
    y = torch.empty(rows, case.columns, dtype=torch.bfloat16)
    clock = time.thread_time if case.threads == 1 else time.perf_counter
    turns = weights if len(weights) > 1 else weights * 30
    given: tuple[Any, ...] = (
        x,
        None,
        None,
        y,
        GatedActivation.NONE,
        case.inputs,
    )  # as older checkouts take it, too
    weights[-1].linear(*given)
    begun = clock()
    for weight in turns:
        weight.linear(*given)
    seconds = (clock() - begun) / len(turns)
    return Answer(seconds, zlib.crc32(y.view(torch.uint8).numpy().tobytes()))


def main() -> None:
    """Run commands until the input ends."""
    opened = open_library()
    assert opened is not None, "the host kernels are built"
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
            assert case is not None, "a case comes first"
            answer = run(case, weights, int(line))
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
