"""Measure decode and prefill steps in each mode: default, without overlap, without graphs, batch-invariant.

    python -m bench.gpu.modes [--device cpu]

Each mode runs in a separate process, one after another, so that each has all of the device's memory. Figures are times, and their
ratios to those of the default mode: above 1 is slower.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench.arguments import command_parser
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.machine import ROOT, environment
from bench.gpu.shapes import shape_for
from bench.gpu.steps import WARM_UP, Grid, open_bench, time_decode, time_prefill
from bench.gpu.synthetic_plans import KvMemoryTooSmall

GRID = Grid((1, 32, 256), (1024,), (2048,), 8192)
TOY_GRID = Grid((1, 3), (32,), (64,), 64)


@dataclass(frozen=True, slots=True)
class Mode:
    """Steps in flight and executor settings of a mode."""

    max_in_flight: int = 2
    executor: dict[str, bool | str] = field(default_factory=dict)


MODES = {
    "default": Mode(),
    "overlap off": Mode(1),
    "graphs off": Mode(2, {"enforce_eager": True}),
    "our attention for prompts": Mode(2, {"attention_backend": "quintet"}),
    "batch-invariant": Mode(2, {"batch_invariant": True}),
}


def measure_mode(mode: Mode, device: str, report: Report) -> dict[str, float]:
    """Return the seconds of decode steps and prefills, by name."""
    grid = GRID if device == "cuda" else TOY_GRID
    bench = open_bench(shape_for(device), device, grid, report, **mode.executor)
    times_s = {}
    for rows in grid.rows:
        for context in grid.contexts:
            try:
                timing, _, _ = time_decode(bench, rows, context, mode.max_in_flight)
            except KvMemoryTooSmall as error:
                report.remark(str(error))
                continue
            times_s[f"decode, batch {rows} x {context}"] = timing.step_s(WARM_UP)
    for length in grid.prompts:
        times_s[f"prefill of {length}"] = time_prefill(bench, length, grid.chunk)
    return times_s


def run_mode(name: str, device: str, figures: Path | None) -> dict[str, float]:
    """Run `measure_mode` in a separate process; return its result."""
    command = [sys.executable, "-m", "bench.gpu.modes", "--mode", name, "--device", device]
    if figures is not None:
        command += ["--figures", str(figures)]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    times_s: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return times_s


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--mode", choices=MODES, help="measure only this mode, in this process; print seconds as JSON"
    )
    add_report_argument(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # kernels and libraries chosen at boot
    report = Report(arguments.figures)
    if arguments.mode is not None:
        times_s = measure_mode(MODES[arguments.mode], arguments.device, report)
        for point, seconds in times_s.items():
            report.figure(Figure(f"{arguments.mode}: {point}", 1e3 * seconds, "ms"))
        print(json.dumps(times_s))
        return
    default: dict[str, float] = {}
    for name in MODES:
        times_s = run_mode(name, arguments.device, arguments.figures)
        for point, seconds in times_s.items():
            report.figure(Figure(f"{name}: {point}", 1e3 * seconds, "ms"))
            if point in default:
                report.figure(Figure(f"{name}: {point}, ratio to default", seconds / default[point], "x"))
        default = default or times_s


if __name__ == "__main__":
    main()
