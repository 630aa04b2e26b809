"""What dividing a model costs on one memory node: one process on all cores beside ranks that have them between them.

Both compute the same steps with `bench.step`, in turn; medians of the repetitions. On one node nothing can be won: this is the
price of meeting and of adding sums, which several nodes have to earn back.

    python -m bench.ranks --shape S --ranks 2 [--repetitions 3] [--save FILE]
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import msgspec

from bench.overhead.run import Machine, _commit, machine
from bench.step import SHAPES

LINE = re.compile(r"rows +(\d+) x (\d+) new, context \d+: +([\d.]+) ms")
BATCHES = (("--rows", "1", "8", "32", "--context", "256"), ("--rows", "1", "--new", "512", "--context", "0"))
"""Decode steps, and a piece of a prompt."""
STEPS = ("20", "5")


class Figure(msgspec.Struct, frozen=True):
    """A batch's median step."""

    ranks: int
    rows: int
    new: int
    step_ms: float
    whole_experts: bool = False


class Report(msgspec.Struct, frozen=True):
    """What a run of this command found."""

    date: str
    commit: str
    machine: Machine
    shape: str
    threads: int
    """In all: of the one process, or of all ranks together."""
    figures: list[Figure]


def measure(shape: str, ranks: int, threads: int, whole_experts: bool) -> list[Figure]:
    """Run `bench.step` once for each kind of batch. threads: of each rank."""
    found = []
    for batch, steps in zip(BATCHES, STEPS, strict=True):
        flags = ["--shape", shape, "--ranks", str(ranks), "--threads", str(threads), "--repetitions", steps]
        flags += ["--whole-experts"] * whole_experts
        command = [sys.executable, "-m", "bench.step", *flags, "--brief", *batch]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found += [
            Figure(ranks, int(rows), int(new), float(ms), whole_experts)
            for rows, new, ms in LINE.findall(printed)
        ]
    return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="in all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    figures: list[Figure] = []
    layouts = {f"one process, {args.threads} threads": (1, False), f"{args.ranks} ranks": (args.ranks, False)}
    if "num_experts" in SHAPES[args.shape]:
        layouts["with whole experts"] = (args.ranks, True)
    for _ in range(args.repetitions):
        for ranks, whole_experts in layouts.values():
            figures += measure(args.shape, ranks, args.threads // ranks, whole_experts)
    print("| rows x new tokens |", " | ".join(layouts), "|\n|---" + "|---" * len(layouts) + "|")
    for rows, new in dict.fromkeys((each.rows, each.new) for each in figures):
        medians = [
            median(
                each.step_ms
                for each in figures
                if (each.ranks, each.whole_experts, each.rows, each.new) == (*layout, rows, new)
            )
            for layout in layouts.values()
        ]
        cells = [f"{each:.2f} ms ({each / medians[0] - 1:+.0%})" for each in medians[1:]]
        print(f"| {rows} x {new} | {medians[0]:.2f} ms |", " | ".join(cells), "|")
    if args.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), args.shape, args.threads, figures)
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
