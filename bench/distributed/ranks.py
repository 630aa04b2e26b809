"""Compare one process on all cores with tensor-parallel ranks that share these cores, on one NUMA node.

Both run the same steps with `bench.step`, alternately; results are medians over the repetitions. On one NUMA node ranks cannot be
faster: the difference is the cost of synchronization and all-reduce, which several nodes must compensate.

    python -m bench.distributed.ranks --shape S --ranks 2 [--repetitions 3] [--save FILE]

With --layout-invariant, compares the same number of ranks without and with that flag. With --kv-together, the shape has one KV
head: compares ranks that each have a copy of it with ranks that divide it (decode context parallelism).
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from bench.arguments import command_parser
from bench.overhead.run import Machine, _commit, machine
from bench.step import SHAPES

LINE = re.compile(r"rows +(\d+) x (\d+) new, context (\d+): +([\d.]+) ms")
BATCHES = (("--rows", "1", "8", "32", "--context", "256"), ("--rows", "1", "--new", "512", "--context", "0"))
"""Flags of decode steps, and of a prefill chunk."""
STEPS = ("20", "5")
ONE_KV_HEAD_BATCHES = (("--rows", "1", "8", "--context", "256"), ("--rows", "1", "8", "--context", "8192"))
"""Flags for a short context (ranks divide the heads) and for a long one (ranks divide the keys)."""


class Layout(NamedTuple):
    """Division of a model."""

    ranks: int
    whole_experts: bool = False
    invariant: bool = False
    together: int = 0
    """Decode context parallel size with one KV head; 1: each rank has a copy. 0: the shape's own KV heads."""


class Figure(msgspec.Struct, frozen=True):
    """Median step time of a batch."""

    ranks: int
    rows: int
    new: int
    step_ms: float
    whole_experts: bool = False
    invariant: bool = False
    together: int = 0
    context: int = 0

    @property
    def layout(self) -> Layout:
        """Division of the model that was measured."""
        return Layout(self.ranks, self.whole_experts, self.invariant, self.together)


class Report(msgspec.Struct, frozen=True):
    """Results of a run of this command."""

    date: str
    commit: str
    machine: Machine
    shape: str
    threads: int
    """Threads of the one process, or of all ranks together."""
    figures: list[Figure]


def measure(shape: str, layout: Layout, threads: int) -> list[Figure]:
    """Run `bench.step` once for each kind of batch. threads: number of threads of all ranks together."""
    found = []
    batches = ONE_KV_HEAD_BATCHES if layout.together else BATCHES
    for batch, steps in zip(batches, STEPS, strict=True):
        flags = ["--shape", shape, "--ranks", str(layout.ranks), "--repetitions", steps]
        flags += ["--threads", str(threads // layout.ranks)]
        flags += ["--whole-experts"] * layout.whole_experts + ["--layout-invariant"] * layout.invariant
        flags += ["--kv-heads", "1", "--kv-together", str(layout.together)] if layout.together else []
        command = [sys.executable, "-m", "bench.step", *flags, "--brief", *batch]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found += [
            Figure(layout.ranks, int(rows), int(new), float(ms), *layout[1:], int(context))
            for rows, new, context, ms in LINE.findall(printed)
        ]
    return found


def main() -> None:
    """Measure, print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="number of threads of all ranks together")
    parser.add_argument(
        "--layout-invariant", action="store_true", help="compare without and with this flag of a server"
    )
    parser.add_argument(
        "--kv-together", action="store_true", help="compare copies of one KV head with a divided one"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    args = parser.parse_args()
    figures: list[Figure] = []
    has_experts = "num_experts" in SHAPES[args.shape]
    layouts = {f"one process, {args.threads} threads": Layout(1), f"{args.ranks} ranks": Layout(args.ranks)}
    if has_experts:
        layouts["expert parallel"] = Layout(args.ranks, whole_experts=True)
    if args.layout_invariant:
        plain = Layout(args.ranks, whole_experts=has_experts and args.ranks > 1)
        layouts = {
            f"ranks: {args.ranks}, threads: {args.threads}": plain,
            "--layout-invariant": plain._replace(invariant=True),
        }
    if args.kv_together:
        layouts = {
            f"{args.ranks} ranks, one copy each": Layout(args.ranks, together=1),
            "decode context parallel": Layout(args.ranks, together=args.ranks),
        }
    for _ in range(args.repetitions):
        for layout in layouts.values():
            figures += measure(args.shape, layout, args.threads)
    print("| rows x new tokens, context |", " | ".join(layouts), "|\n|---" + "|---" * len(layouts) + "|")
    for batch in dict.fromkeys((each.rows, each.new, each.context) for each in figures):
        medians = [
            median(
                each.step_ms
                for each in figures
                if (each.layout, (each.rows, each.new, each.context)) == (layout, batch)
            )
            for layout in layouts.values()
        ]
        cells = [f"{each:.2f} ms ({each / medians[0] - 1:+.0%})" for each in medians[1:]]
        print(f"| {batch[0]} x {batch[1]}, {batch[2]} | {medians[0]:.2f} ms |", " | ".join(cells), "|")
    if args.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(date, _commit(), machine(), args.shape, args.threads, figures)
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
