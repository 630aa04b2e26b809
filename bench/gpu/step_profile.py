"""Profile decode and prefill steps of the 8 B shape: device time by kernel, gaps, host time, and a trace.

    python -m bench.gpu.step_profile [--batch-invariant] [--trace FILE.json.gz] [--device cpu]

One worker runs all points. Each point is first timed as in `bench.gpu.steps`; then three steps run under ``torch.profiler``, and
a table has microseconds by kernel. ``--batch-invariant`` skips the timing of libraries at boot, for machines on which that fails.
"""

from __future__ import annotations

import gzip
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.arguments import command_parser
from bench.gpu.ceilings import report_ceilings
from bench.gpu.engine import drive
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.host import NUM_DECODES, PROMPT, mixed_steps
from bench.gpu.shapes import shape_for
from bench.gpu.steps import (
    WARM_UP,
    Bench,
    Grid,
    measure_decode,
    measure_prefill,
    open_bench,
)
from bench.gpu.synthetic_plans import Batch, KvMemoryTooSmall
from quintet.wire.step import StepPlan

GRID = Grid((1, 32, 256), (1024,), (2048, 8192), 8192)
TOY_GRID = Grid((1, 3), (64,), (32, 96), 64)
NUM_PROFILED = 3
NUM_KERNELS = 12
"""Kernels in a table."""


def run_profiled(bench: Bench, name: str, steps: Sequence[StepPlan], report: Report) -> Any:
    """Run steps under the profiler; report the kernels with the most device time. Return the profile."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profile_result:
        begin_s = time.perf_counter()
        drive(bench.worker, steps)
        step_ms = 1e3 * (time.perf_counter() - begin_s) / len(steps)
    # Host operators have the time of their kernels too; only device events are counted.
    on_device = [
        event
        for event in profile_result.key_averages()
        if event.device_type == torch._C._autograd.DeviceType.CUDA
    ]
    on_device.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in on_device)
    lines = [f"{name}: {step_ms:.2f} ms per step under the profiler; {total / len(steps):.0f} us in kernels"]
    for event in on_device[:NUM_KERNELS]:
        share = event.self_device_time_total / total
        lines.append(
            f"  {event.self_device_time_total / len(steps):9.1f} us {share:5.0%} {event.count / len(steps):6.1f} x "
            f"{event.key[:70]}"
        )
    report.remark("\n".join(lines))
    return profile_result


def profile_decode(bench: Bench, rows: int, context: int, report: Report) -> Any:
    """Profile decode steps of a batch."""
    bench.worker.reset()
    batch = Batch(bench.plans, rows, context, WARM_UP + NUM_PROFILED)
    drive(bench.worker, batch.admissions)
    drive(bench.worker, [batch.step() for _ in range(WARM_UP)])
    steps = [batch.step() for _ in range(NUM_PROFILED)]
    return run_profiled(bench, f"decode, batch {rows} x {context}", steps, report)


def profile_prefill(bench: Bench, length: int, chunk: int, report: Report) -> Any:
    """Profile the prefill of one prompt."""
    bench.worker.reset()
    admission, *steps = bench.plans.prompt(length, chunk)
    drive(bench.worker, [admission])
    return run_profiled(bench, f"prefill of {length}", steps, report)


def measure_host(bench: Bench, report: Report) -> None:
    """Report the host time of a step without graphs."""
    bench.worker.reset()
    admissions, steps = mixed_steps(bench.plans, WARM_UP + 20)
    drive(bench.worker, admissions)
    timing = drive(bench.worker, steps)
    name = f"a prompt of {PROMPT} tokens and {NUM_DECODES} decode rows"
    report.figure(Figure(f"{name}: host", 1e6 * median(timing.host_s[WARM_UP:]), "µs"))
    report.figure(Figure(f"{name}: step", 1e3 * timing.step_s(WARM_UP), "ms"))


def write_trace(profile_result: Any, target: Path) -> None:
    """Write a Chrome trace, compressed by gzip."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profile_result.export_chrome_trace(str(plain))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.compress(plain.read_bytes(), 6))


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch-invariant", action="store_true", help="use our products and attention only")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="Chrome trace of the middle batch, gzipped"
    )
    add_report_argument(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    report, grid = Report(arguments.figures), GRID if arguments.device == "cuda" else TOY_GRID
    bench = open_bench(
        *(shape_for(arguments.device), arguments.device, grid, report),
        batch_invariant=arguments.batch_invariant,
    )
    report_ceilings(bench.ceilings, report)
    measure_decode(bench, grid, report)
    if arguments.device == "cuda":  # the toy's KV memory is too small
        measure_host(bench, report)
    measure_prefill(bench, grid, report)
    with profile(activities=[ProfilerActivity.CPU]):  # warm-up: the first profile imports modules
        pass
    for rows in grid.rows:
        try:
            profile_result = profile_decode(bench, rows, grid.contexts[0], report)
        except KvMemoryTooSmall as error:
            report.remark(str(error))
            continue
        if arguments.trace is not None and rows == grid.rows[len(grid.rows) // 2]:
            write_trace(profile_result, arguments.trace)
    for length in grid.prompts:
        profile_prefill(bench, length, grid.chunk, report)


if __name__ == "__main__":
    main()
