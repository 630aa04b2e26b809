"""Time to draw a step's tokens, and to report log-probabilities: the host kernels beside their torch references.

    python -m bench.kernels.sampling [--threads 2] [--repeats 30] [--no-reference] [--save FILE]

Logits are bf16 and normally distributed. ``spread`` is their standard deviation: 4 resembles a language model that knows
what comes next (top-p keeps few tokens), 1.5 one with random weights (top-p 0.95 keeps a third of the vocabulary). Medians of
repeats, in milliseconds for the whole batch; ``GB/s`` counts the logits once.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library, set_threads
from quintet.executor.sampling.draw import draw
from quintet.executor.sampling.draw_on_host import draw_on_host
from quintet.executor.sampling.logprob_entries import entries
from quintet.executor.sampling.logprob_entries_on_host import entries_on_host
from quintet.executor.sampling.settings import RECORD, settings_of
from quintet.wire.params import SamplingParams

SHAPES = ((1, 151_936), (32, 151_936), (256, 33_024))
"""Rows and vocabulary: one stream and a batch of Qwen2.5, a large batch of a small vocabulary."""

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50, top-p 0.95": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
}
TOP = 20
REFERENCE_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """One case."""

    rows: int
    vocab_size: int
    spread: float
    case: str
    kernel_ms: float
    read_gb_s: float
    reference_ms: float | None


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call, after one that warms up."""
    call()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def measure(rows: int, vocab_size: int, spread: float, repeats: int, with_reference: bool) -> list[Timing]:
    """Time every case on one batch of logits."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocab_size, generator=generator) * spread).bfloat16()
    slots = np.arange(rows)
    own = torch.arange(rows, dtype=torch.int32)
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for name, params in PARAMS.items():
        settings = np.array([settings_of(params, seed) for seed in range(rows)], RECORD)
        calls[name] = (
            partial(draw_on_host, logits, settings, slots, slots),
            partial(draw, logits, settings, slots, slots),
        )
    calls[f"log-probabilities, top {TOP}"] = (
        partial(entries_on_host, logits, own, TOP),
        partial(entries, logits, own, TOP),
    )
    timings = []
    for name, (kernel, reference) in calls.items():
        kernel_ms = median_ms(kernel, repeats)
        timings.append(
            Timing(
                rows=rows,
                vocab_size=vocab_size,
                spread=spread,
                case=name,
                kernel_ms=round(kernel_ms, 3),
                read_gb_s=round(logits.nbytes / kernel_ms / 1e6, 1),
                reference_ms=round(median_ms(reference, REFERENCE_REPEATS), 3) if with_reference else None,
            )
        )
    return timings


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Time the kernels that draw tokens and report log-probabilities."
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of the kernels and of torch (default: 2)"
    )
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of each kernel (default: 30)")
    parser.add_argument("--no-reference", action="store_true", help="do not time the torch references")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON too")
    arguments = parser.parse_args()
    library = open_library()
    if library is None:
        parser.error(
            "the host kernels are not built; install with a C++ compiler, or run `python setup.py build_ext`"
        )
    set_threads(library, arguments.threads, pinned=False)
    torch.set_num_threads(arguments.threads)
    isa = instruction_set(library)
    print(f"{platform.processor() or platform.machine()}, {isa}, {arguments.threads} threads; bf16 logits")
    print(
        f"{'rows':>5} {'vocab':>8} {'spread':>6}  {'case':<26} {'kernel ms':>10} {'GB/s':>6} {'torch ms':>10}"
    )
    timings: list[Timing] = []
    with torch.inference_mode():
        for rows, vocab_size in SHAPES:
            for spread in (4.0, 1.5):
                timings += measure(rows, vocab_size, spread, arguments.repeats, not arguments.no_reference)
                for each in timings[-len(PARAMS) - 1 :]:
                    torch_ms = "" if each.reference_ms is None else f"{each.reference_ms:.2f}"
                    print(
                        f"{each.rows:>5} {each.vocab_size:>8} {each.spread:>6}  {each.case:<26}"
                        f" {each.kernel_ms:>10.3f} {each.read_gb_s:>6.1f} {torch_ms:>10}"
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
