"""Measure a layer of experts with several numbers of tokens, compared with the machine's read bandwidth.

    python -m bench.kernels.experts [--threads 2] [--formats bf16 int8 ...] [--tokens 1 4 ...] [--processor-time]

The lower bound of a step's time is one read of the weights of all chosen experts. The share is this bound divided by the step's
time. Bandwidth varies, so it is measured before and after each repeat. All figures are medians. Each call chooses experts by
random scores; there are so many layers that their weights are not in a cache. With many tokens, multiplications are the limit:
see `bench.kernels.linear`.

For one token, calls alternate with those of a dense layer that has as many bytes as the chosen experts. The difference of both
shares is the cost of the experts. "time / dense" is the median ratio of adjacent calls.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from bench.kernels.limits import Limits
from bench.kernels.linear import FORMATS, GATHER_S, WEIGHT_BYTES, Format
from quintet.executor.backends.cpu.ops.experts import Gate, route
from quintet.executor.backends.cpu.ops.host_experts import HostExperts
from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library, set_threads
from quintet.executor.backends.cpu.ops.host_linear import LinearLibrary, linear_library
from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.model_config.experts import Routing, Scoring

TOKENS = (1, 2, 4, 16, 64)
CALLS = 8
"""Calls between two measurements of the bandwidth."""
LAYERS = 2
LINE_BYTES = 64
GATE = Gate(activation=GatedActivation.SILU_AND_MUL)


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a layer of experts."""

    hidden: int
    width: int
    routing: Routing


def _softmax(experts: int, chosen: int) -> Routing:
    return Routing(experts=experts, chosen=chosen, scoring=Scoring.SOFTMAX, renormalise=True)


SHAPES = {
    "Qwen3-30B-A3B": Shape(2048, 768, _softmax(128, 8)),
    "OLMoE-1B-7B": Shape(2048, 1024, _softmax(64, 8)),
    "Mixtral-8x7B": Shape(4096, 14_336, _softmax(8, 2)),
    "gpt-oss-20b": Shape(2880, 2880, _softmax(32, 4)),
}


def make(library: LinearLibrary, shape: Shape, chosen: Format) -> tuple[HostExperts, int]:
    """Return a layer with random weights, and the bytes of an expert. All experts have copies of the same numbers.

    The memory layout is that of a server: contiguous, on huge pages.
    """

    def pack(columns: int, depth: int, paired: bool) -> list[PackedWeight]:
        source = torch.randn(columns, depth) * depth**-0.5
        kind = int(chosen.weight)
        each = library.weight_bytes(kind, columns, depth, chosen.group, 0)
        apart = -(-each // LINE_BYTES) * LINE_BYTES
        pages = HugePages(apart * shape.routing.experts)
        packed = [
            PackedWeight(
                library, chosen.weight, columns, depth, group=chosen.group, paired=paired,
                memory=pages.memory[i * apart : i * apart + each],
            )
            for i in range(shape.routing.experts)
        ]  # fmt: skip
        packed[0].fill(source)
        for weight in packed[1:]:
            weight.memory.copy_(packed[0].memory)
        pages.gather(GATHER_S)
        return packed

    gate_up, down = pack(2 * shape.width, shape.hidden, True), pack(shape.hidden, shape.width, False)
    layer = HostExperts(shape.routing, GATE, gate_up, down, inputs=(chosen.inputs, chosen.inputs))
    return layer, gate_up[0].memory.numel() + down[0].memory.numel()


class Dense:
    """Gated layers as wide as the chosen experts together; there are so many that none is in a cache."""

    def __init__(self, library: LinearLibrary, shape: Shape, chosen: Format) -> None:
        """Fill all layers with the same random numbers."""
        self._inputs = chosen.inputs
        width = shape.width * shape.routing.chosen
        self._inner = torch.empty(1, width, dtype=chosen.dtype)
        self._layers: list[tuple[PackedWeight, PackedWeight]] = []
        while not self._layers or len(self._layers) * self.bytes < WEIGHT_BYTES:
            gate_up = self._pack(library, chosen, 2 * width, shape.hidden, True)
            self._layers.append((gate_up, self._pack(library, chosen, shape.hidden, width, False)))

    @property
    def bytes(self) -> int:
        """Bytes of one layer."""
        return sum(weight.memory.numel() for weight in self._layers[0])

    def _pack(
        self, library: LinearLibrary, chosen: Format, columns: int, depth: int, paired: bool
    ) -> PackedWeight:
        size = library.weight_bytes(int(chosen.weight), columns, depth, chosen.group, 0)
        pages = HugePages(size)
        weight = PackedWeight(
            library, chosen.weight, columns, depth, group=chosen.group, paired=paired, memory=pages.memory
        )  # fmt: skip
        if self._layers:
            weight.memory.copy_(self._layers[0][0 if paired else 1].memory)
        else:
            weight.fill(torch.randn(columns, depth) * depth**-0.5)
        pages.gather(GATHER_S)
        return weight

    def __call__(self, x: torch.Tensor, call: int) -> None:
        """Compute a layer, a different one in each call."""
        gate_up, down = self._layers[call % len(self._layers)]
        gate_up.linear(x, out=self._inner, activation=GATE.activation, inputs=self._inputs)
        down.linear(self._inner, inputs=self._inputs)


def measure(
    limits: Limits,
    layers: list[HostExperts],
    each: int,
    dense: Dense,
    shape: Shape,
    chosen: Format,
    tokens: int,
    repeats: int,
) -> str:
    """Measure one number of tokens; return a table row."""
    scores = [torch.randn(tokens, shape.routing.experts).to(chosen.dtype) for _ in range(CALLS)]
    counts = [len(route(one, shape.routing, None)[0].unique()) for one in scores]
    x = torch.randn(tokens, shape.hidden).to(chosen.dtype)
    gigabytes = each * sum(counts) / CALLS / 1e9
    reads, rates = [limits.read_gb_s()], []
    denses: list[float] = []
    for _ in range(repeats):
        begin_s = limits.clock()
        for i, one in enumerate(scores):
            layers[i % len(layers)](x, one)
        rates.append(gigabytes * CALLS / (limits.clock() - begin_s))
        reads.append(limits.read_gb_s())
        if tokens == 1:
            begin_s = limits.clock()
            for i in range(CALLS):
                dense(x, i)
            denses.append(dense.bytes * CALLS / 1e9 / (limits.clock() - begin_s))
            reads.append(limits.read_gb_s())
    between = list(pairwise(reads))
    step = 2 if denses else 1
    rate = median(rates)
    counted = f"{tokens} | {sum(counts) / CALLS:.1f} | {gigabytes / rate * 1e6:,.0f}"
    row = f"{counted} | {rate:.1f} of {median(reads):.1f} | {_share(rates, between[::step]):.0%}"
    if not denses:
        return f"{row} | – | – |"
    slower = median(b / a for a, b in zip(rates, denses, strict=True))
    return f"{row} | {_share(denses, between[1::step]):.0%} | {slower:.3f} |"


def _share(rates: list[float], bandwidths: list[tuple[float, float]]) -> float:
    """Return the median of the rates, each divided by the mean bandwidth before and after it."""
    return median(rate * 2 / sum(reads) for rate, reads in zip(rates, bandwidths, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure layers of experts.")
    parser.add_argument("--threads", type=int, default=2, help="threads of the kernels (default: 2)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "int8", "int4"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["Qwen3-30B-A3B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=10, help="repeats of each case (default: 10)")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure CPU time instead of wall time, for a machine with other load; needs --threads 1",
    )
    arguments = parser.parse_args()
    opened, library = open_library(), linear_library()
    if opened is None or library is None:
        parser.error("the host kernels are not built")
    if arguments.processor_time and arguments.threads != 1:
        parser.error(
            f"--processor-time measures one thread, but --threads is {arguments.threads}; pass --threads 1"
        )
    set_threads(opened, arguments.threads, False)
    limits = Limits(opened, time.thread_time if arguments.processor_time else time.perf_counter)
    print(f"Instruction set {instruction_set(opened)}, {arguments.threads} threads.\n")
    print(
        "| format | shape | tokens | experts read | µs | GB/s of bandwidth | share | dense layer | time / dense |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in arguments.formats:
        for shape in arguments.shapes:
            layers_and_bytes = [make(library, SHAPES[shape], FORMATS[name]) for _ in range(LAYERS)]
            layers, dense = (
                [layer for layer, _ in layers_and_bytes],
                Dense(library, SHAPES[shape], FORMATS[name]),
            )
            for tokens in arguments.tokens:
                row = measure(
                    limits,
                    layers,
                    layers_and_bytes[0][1],
                    dense,
                    SHAPES[shape],
                    FORMATS[name],
                    tokens,
                    arguments.repeats,
                )
                print(f"| {name} | {shape} | {row}", flush=True)


if __name__ == "__main__":
    main()
