"""Gain of graphs and overlap, and cost of ``--batch-invariant``: the same decode steps and prompt in each mode.

    python -m bench.gpu.modes [--device cpu]

A process per mode, one after the other, so that each has the device's whole memory. Figures are times, and their ratio to the
default mode's: above 1 is slower.
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
from bench.gpu.plans import NoRoom
from bench.gpu.shapes import shape_for
from bench.gpu.steps import WARM_UP, Grid, open_bench, time_decode, time_prefill

GRID = Grid((1, 32, 256), (1024,), (2048,), 8192)
TOY_GRID = Grid((1, 3), (32,), (64,), 64)


@dataclass(frozen=True, slots=True)
class Mode:
    """Mode of running steps."""

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
    """Return the seconds of a step, or of a prompt, by what it is."""
    grid = GRID if device == "cuda" else TOY_GRID
    bench = open_bench(shape_for(device), device, grid, report, **mode.executor)
    taken = {}
    for rows in grid.rows:
        for context in grid.contexts:
            try:
                timing, _, _ = time_decode(bench, rows, context, mode.max_in_flight)
            except NoRoom as error:
                report.remark(str(error))
                continue
            taken[f"decode, batch {rows} x {context}"] = timing.step_s(WARM_UP)
    for length in grid.prompts:
        taken[f"prefill of {length}"] = time_prefill(bench, length, grid.chunk)
    return taken


def measure_elsewhere(name: str, device: str, figures: Path | None) -> dict[str, float]:
    """Return `measure_mode` of a process of its own."""
    command = [sys.executable, "-m", "bench.gpu.modes", "--mode", name, "--device", device]
    if figures is not None:
        command += ["--figures", str(figures)]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    taken: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return taken


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--mode", choices=MODES, help="measure this one in this process; print seconds as JSON"
    )
    add_report_argument(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what was chosen at boot, and why
    report = Report(arguments.figures)
    if arguments.mode is not None:
        taken = measure_mode(MODES[arguments.mode], arguments.device, report)
        for what, seconds in taken.items():
            report.figure(Figure(f"{arguments.mode}: {what}", 1e3 * seconds, "ms"))
        print(json.dumps(taken))
        return
    default: dict[str, float] = {}
    for name in MODES:
        taken = measure_elsewhere(name, arguments.device, arguments.figures)
        for what, seconds in taken.items():
            report.figure(Figure(f"{name}: {what}", 1e3 * seconds, "ms"))
            if what in default:
                report.figure(Figure(f"{name}: {what}, of default", seconds / default[what], "x"))
        default = default or taken


if __name__ == "__main__":
    main()
