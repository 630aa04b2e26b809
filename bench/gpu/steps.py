"""Measure decode steps compared with memory bandwidth, and prefill compared with the multiply rate, with random weights.

    python -m bench.gpu.steps --part decode          # batch 1 to 256, contexts of 1 k and 8 k
    python -m bench.gpu.steps --part prefill         # prompts of 2 k, 8 k and 32 k tokens
    python -m bench.gpu.steps --part decode --device cpu    # toy shape, to debug this file

A worker in this process runs synthetic plans (`bench.gpu.synthetic_plans`), with two steps in flight as in the server. The
roofline of a decode step is the time to copy the bytes of its weights and KV. The ceilings are measured first, in the same
process.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from bench.arguments import command_parser
from bench.gpu.ceilings import Ceilings, measure_ceilings, report_ceilings
from bench.gpu.engine import MAX_IN_FLIGHT, Timing, drive, run_idle_tasks
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.shapes import BLOCK_SIZE, Shape, engine_config, shape_for
from bench.gpu.synthetic_plans import Batch, KvMemoryTooSmall, Plans
from quintet.executor.backends.registry import make_worker
from quintet.executor.interface import StepWorker

WARM_UP = 8
MEASURED_S = 0.6
"""Approximate duration of the measured steps of a point."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Measured points: batch sizes, context lengths, prompt lengths."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    chunk: int
    """Tokens of a prompt computed in one step."""

    @property
    def max_model_len(self) -> int:
        """Context length for the longest prompt or context."""
        return max(*self.prompts, *self.contexts) + 1024


GRID = Grid((1, 8, 32, 128, 256), (1024, 8192), (2048, 8192, 32768), 8192)
TOY_GRID = Grid((1, 3), (32, 64), (32, 96), 64)


def grid_for(device: str) -> Grid:
    """Return the points of a device."""
    return GRID if device == "cuda" else TOY_GRID


@dataclass(frozen=True, slots=True)
class Bench:
    """A ready worker, its plans, and the ceilings of the device."""

    worker: StepWorker
    shape: Shape
    plans: Plans
    ceilings: Ceilings


def open_bench(shape: Shape, device: str, grid: Grid, report: Report, **executor: bool | str) -> Bench:
    """Measure the ceilings, load the worker, and fill its KV memory with computed values."""
    ceilings = measure_ceilings(torch.device(device))
    if device == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(
            shape,
            Path(folder),
            device,
            max_num_seqs=max(grid.rows),
            max_model_len=grid.max_model_len,
            max_num_batched_tokens=grid.chunk,
            **executor,
        )
        begin_s = time.perf_counter()
        worker = make_worker(config)
    if device == "cuda":
        check_is_device_worker(worker)
    load_s = time.perf_counter() - begin_s
    report.remark(
        f"{shape.name}: {worker.facts.get('worker', '')}; ready in {load_s:.1f} s; {worker.num_blocks} blocks"
    )
    plans = Plans(shape.vocab_size, worker.num_blocks, BLOCK_SIZE, grid.max_model_len)
    drive(worker, plans.fill(grid.chunk))
    run_idle_tasks(worker)
    return Bench(worker, shape, plans, ceilings)


def check_is_device_worker(worker: StepWorker) -> None:
    """Raise SystemExit if torch's operators or a CPU compute, since the figures are for our CUDA kernels."""
    from quintet.executor.backends.cuda.worker import DeviceWorker

    if not isinstance(worker, DeviceWorker):
        raise SystemExit(f"the worker does not use our CUDA kernels: {worker.facts}")


def time_decode(
    bench: Bench, rows: int, context: int, max_in_flight: int = MAX_IN_FLIGHT
) -> tuple[Timing, float, int]:
    """Return the timing of a batch's steps, the mean length of its rows, and its number of different contexts."""
    bound_s = bench.shape.decode_bytes(rows, context) / bench.ceilings.copy_bytes_per_s
    num_steps = max(8, min(200, int(MEASURED_S / bound_s)))
    bench.worker.reset()
    batch = Batch(bench.plans, rows, context, WARM_UP + num_steps)
    drive(bench.worker, batch.admissions, max_in_flight)
    plans = [batch.step() for _ in range(WARM_UP + num_steps)]
    timing = drive(bench.worker, plans, max_in_flight)
    return timing, context + WARM_UP + num_steps / 2, batch.num_contexts


def measure_decode(bench: Bench, grid: Grid, report: Report) -> None:
    """Measure and report all batch sizes and contexts."""
    for context in grid.contexts:
        for rows in grid.rows:
            name = f"decode, batch {rows} x {context}"
            try:
                timing, length, contexts = time_decode(bench, rows, context)
            except KvMemoryTooSmall as error:
                report.remark(f"{name}: not measured: {error}")
                continue
            step_s = timing.step_s(WARM_UP)
            bound_s = bench.shape.decode_bytes(rows, length) / bench.ceilings.copy_bytes_per_s
            remark = "" if contexts == rows else f"rows share {contexts} contexts, limited by KV memory"
            targets = {1: 90.0, 256: 80.0}
            report.figure(Figure(name, rows / step_s, "tokens/s"))
            report.figure(
                Figure(
                    f"{name}, of the roofline", 100 * bound_s / step_s, "%", targets.get(rows), remark=remark
                )
            )
            host_s = median(timing.host_s[WARM_UP:])
            report.figure(Figure(f"{name}, host time per step", host_s * 1e6, "µs"))
            gap = timing.gap_share(WARM_UP)
            if gap is not None:
                bound = 2.0 if rows in targets else None
                report.figure(Figure(f"{name}, device idle", 100 * gap, "%", at_most=bound))


def time_prefill(bench: Bench, length: int, chunk: int) -> float:
    """Return the time from a prompt's first step to its first token; median of three."""
    times_s = []
    for _ in range(3):
        bench.worker.reset()
        admission, *steps = bench.plans.prompt(length, chunk)
        drive(bench.worker, [admission])
        timing = drive(bench.worker, steps)
        times_s.append(timing.ends_s[-1] - timing.begun_s)
    return median(times_s)


def measure_prefill(bench: Bench, grid: Grid, report: Report) -> None:
    """Tell every length of prompt."""
    for length in grid.prompts:
        name = f"prefill of {length}"
        try:
            prefill_s = time_prefill(bench, length, grid.chunk)
        except KvMemoryTooSmall as error:
            report.remark(f"{name}: not measured: {error}")
            continue
        share = bench.shape.prefill_flops(length) / prefill_s / bench.ceilings.flops
        report.figure(Figure(name, length / prefill_s, "tokens/s"))
        report.figure(Figure(f"{name}, of the matmul rate", 100 * share, "%", 70.0))


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--part", choices=("decode", "prefill", "both"), default="both")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_report_argument(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # kernels and libraries chosen at boot
    report, grid = Report(arguments.figures), grid_for(arguments.device)
    bench = open_bench(shape_for(arguments.device), arguments.device, grid, report)
    report_ceilings(bench.ceilings, report)
    if arguments.part != "prefill":
        measure_decode(bench, grid, report)
    if arguments.part != "decode":
        measure_prefill(bench, grid, report)


if __name__ == "__main__":
    main()
