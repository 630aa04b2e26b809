"""Load balance of a step over many threads, from the recorded program and the kernels' own cutting. Nothing is run.

For each number of threads: the mean thread's work over the busiest one's, were all equally fast, with the busiest of each
operation added up (its end is a barrier); barriers in a step; bytes of weights and KV that more than one piece of work reads.
Work is counted in multiplications, a weight or key that few rows share as as many as take the time to read it.

    python -m bench.distributed.thread_balance                       # S and M, 2 to 96 threads
    python -m bench.distributed.thread_balance --shapes S --threads 64 --operations
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.arguments import command_parser
from bench.step import SHAPES, Room, config_of
from quintet.executor.backends.cpu.program.runner import OpBalance, ProgramRunner
from quintet.executor.backends.registry import make_worker
from quintet.executor.worker import Worker

THREADS = (2, 4, 8, 16, 32, 48, 64, 96)
STEPS = {"decode, 1 row": (1, 256, 1), "decode, 32 rows": (32, 256, 1), "prompt of 2,048": (1, 0, 2048)}
"""Rows, tokens each has before, tokens each computes."""


def share(operations: Sequence[OpBalance], threads: int) -> float:
    """Return the mean thread's work over the busiest one's."""
    busiest = sum(each.busiest for each in operations)
    return sum(each.cost for each in operations) / threads / busiest if busiest else 1.0


def rows_of_table(runner: ProgramRunner, shape: str, all_threads: Sequence[int]) -> list[str]:
    """Return a line for each kind of step."""
    lines = []
    for name, (rows, before, new) in STEPS.items():
        shares, barriers, again = [], [], []
        for threads in all_threads:
            operations = runner.balance([before] * rows, [new] * rows, threads)
            shares.append(f"{share(operations, threads):.1%}")
            barriers.append(sum(each.pieces > 0 for each in operations))
            again.append(sum(each.bytes_again for each in operations))
        read = sum(each.bytes - each.bytes_again for each in operations)
        waits = f"{barriers[0]} to {barriers[-1]}"
        twice = f"{again[0] / 1e6:,.0f} to {again[-1] / 1e6:,.0f}"
        lines.append(f"| {shape}, {name} | {' | '.join(shares)} | {waits} | {read / 1e6:,.0f} | {twice} |")
    return lines


def print_operations(runner: ProgramRunner, shape: str, threads: int) -> None:
    """Print the operations of each kind of step, those with most work first."""
    for name, (rows, before, new) in STEPS.items():
        groups: dict[str, list[OpBalance]] = defaultdict(list)
        operations = runner.balance([before] * rows, [new] * rows, threads)
        for each in operations:
            if each.pieces:
                groups[f"{each.name} ({each.pieces} pieces)"].append(each)
        step = sum(each.busiest for each in operations)
        print(f"\n{shape}, {name}, {threads} threads\n")
        print("| operation | times | of the step | mean over busiest | MB read | again |")
        print("|---|---:|---:|---:|---:|---:|")
        for title, group in sorted(groups.items(), key=lambda item: -sum(each.busiest for each in item[1])):
            of_step = sum(each.busiest for each in group) / step
            read, again = (sum(getattr(each, f) for each in group) / 1e6 for f in ("bytes", "bytes_again"))
            print(
                f"| {title} | {len(group)} | {of_step:.1%} | {share(group, threads):.1%} | {read:,.1f} | {again:,.1f} |"
            )


def main() -> None:
    """Parse the command line and print."""
    parser = command_parser(__doc__)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREADS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4", "w8a8"), default="none")
    parser.add_argument(
        "--operations", action="store_true", help="each operation, at the last number of threads"
    )
    chosen = parser.parse_args()
    if min(chosen.threads) < 1:
        parser.error(f"--threads has {min(chosen.threads)}; each must be at least 1")
    room = Room(
        rows=[max(rows for rows, _, _ in STEPS.values())],
        context=2048,
        new=1,
        repetitions=0,
        dtype=chosen.dtype,
        quantization=chosen.quantization,
    )
    print(f"| step | {' | '.join(f'{n} threads' for n in chosen.threads)} | barriers | MB once | MB again |")
    print("|---|" + "---:|" * (len(chosen.threads) + 3))
    runners = {}
    for shape in chosen.shapes:
        with tempfile.TemporaryDirectory() as folder:
            worker = make_worker(config_of(Path(folder), SHAPES[shape], room))
        assert isinstance(worker, Worker)
        runner = worker.runner
        assert isinstance(runner, ProgramRunner), "the compiled kernels are not in use"
        print("\n".join(rows_of_table(runner, shape, chosen.threads)), flush=True)
        runners[shape] = worker, runner
    for shape, (_, runner) in runners.items():
        if chosen.operations:
            print_operations(runner, shape, chosen.threads[-1])


if __name__ == "__main__":
    main()
