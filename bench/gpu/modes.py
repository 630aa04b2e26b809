"""What graphs and overlap buy, and what ``--batch-invariant`` costs: the same decode steps in each mode.

    python -m bench.gpu.modes [--device cpu]

A worker per mode, one after the other in one process, the ceilings measured beside each: figures are times relative to the
default mode's, and above 1 is slower.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass, field

import torch

from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.plans import NoRoom
from bench.gpu.shapes import shape_for
from bench.gpu.steps import WARM_UP, Grid, open_bench, time_decode, time_prefill

GRID = Grid((1, 32, 256), (1024,), (2048,), 8192)
TOY_GRID = Grid((1, 3), (32,), (64,), 64)
KV_BYTES = 40 << 30
"""Enough for 256 rows of 1 k; less than what is there, so that a mode's memory need not be given back to the last byte."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How steps are run."""

    name: str
    max_in_flight: int = 2
    executor: dict[str, bool] = field(default_factory=dict)


MODES = (
    Mode("default"),
    Mode("overlap off", 1),
    Mode("graphs off", 2, {"enforce_eager": True}),
    Mode("batch-invariant", 2, {"batch_invariant": True}),
)


def measure_mode(mode: Mode, device: str, grid: Grid, report: Report) -> dict[str, float]:
    """Return the seconds of a step, or of a prompt, by what it is."""
    memory = KV_BYTES if device == "cuda" else 0
    bench = open_bench(shape_for(device), device, grid, report, memory, **mode.executor)
    taken = {}
    for rows in grid.rows:
        for context in grid.contexts:
            try:
                timing, _, _ = time_decode(bench, rows, context, mode.max_in_flight)
            except NoRoom as error:
                report.remark(f"{mode.name}: {error}")
                continue
            taken[f"decode, batch {rows} x {context}"] = timing.step_s(WARM_UP)
    for length in grid.prompts:
        taken[f"prefill of {length}"] = time_prefill(bench, length, grid.chunk)
    return taken


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_report_argument(parser)
    arguments = parser.parse_args()
    report = Report(arguments.figures)
    grid = GRID if arguments.device == "cuda" else TOY_GRID
    default: dict[str, float] = {}
    for mode in MODES:
        taken = measure_mode(mode, arguments.device, grid, report)
        default = default or taken
        for what, seconds in taken.items():
            report.figure(Figure(f"{mode.name}: {what}", 1e3 * seconds, "ms"))
            if mode is not MODES[0] and what in default:
                report.figure(Figure(f"{mode.name}: {what}, of default", seconds / default[what], "x"))
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
