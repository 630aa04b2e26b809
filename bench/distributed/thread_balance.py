"""Compute the load balance of a step over many threads, from the recorded program and the kernels' division of work.

The command runs no step. For each number of threads it prints:

* the mean work of a thread divided by that of the busiest one. Work of the busiest thread is summed over operations, since each
  operation ends with a barrier.
* the number of barriers in a step.
* the bytes of weights and KV that more than one piece of work reads.

Work is counted in multiplications. A weight or key that few rows share counts as the multiplications that take as long as its
read.

    python -m bench.distributed.thread_balance                       # S and M, 2 to 96 threads
    python -m bench.distributed.thread_balance --shapes S --threads 64 --operations
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.arguments import command_parser
from bench.kernels.op_balance import OpBalance, balance_of
from bench.step import SHAPES, Setup, config_of
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.registry import make_worker
from quintet.executor.worker import Worker

THREADS = (2, 4, 8, 16, 32, 48, 64, 96)
STEPS = {"decode, 1 row": (1, 256, 1), "decode, 32 rows": (32, 256, 1), "prompt of 2,048": (1, 0, 2048)}
"""Rows, context tokens of each, new tokens of each."""


def balance(operations: Sequence[OpBalance], threads: int) -> float:
    """Return the mean work of a thread divided by that of the busiest one."""
    busiest = sum(each.busiest for each in operations)
    return sum(each.cost for each in operations) / threads / busiest if busiest else 1.0


def rows_of_table(runner: ProgramRunner, shape: str, all_threads: Sequence[int]) -> list[str]:
    """Return a table row for each kind of step."""
    lines = []
    for name, (rows, context, new) in STEPS.items():
        balances, barriers, repeated = [], [], []
        for threads in all_threads:
            operations = balance_of(runner, [context] * rows, [new] * rows, threads)
            balances.append(f"{balance(operations, threads):.1%}")
            barriers.append(sum(each.pieces > 0 for each in operations))
            repeated.append(sum(each.bytes_again for each in operations))
        once = sum(each.bytes - each.bytes_again for each in operations)
        waits = f"{barriers[0]} to {barriers[-1]}"
        twice = f"{repeated[0] / 1e6:,.0f} to {repeated[-1] / 1e6:,.0f}"
        lines.append(f"| {shape}, {name} | {' | '.join(balances)} | {waits} | {once / 1e6:,.0f} | {twice} |")
    return lines


def print_operations(runner: ProgramRunner, shape: str, threads: int) -> None:
    """Print the operations of each kind of step, those with most work first."""
    for name, (rows, context, new) in STEPS.items():
        groups: dict[str, list[OpBalance]] = defaultdict(list)
        operations = balance_of(runner, [context] * rows, [new] * rows, threads)
        for each in operations:
            if each.pieces:
                groups[f"{each.name} ({each.pieces} pieces)"].append(each)
        step = sum(each.busiest for each in operations)
        print(f"\n{shape}, {name}, {threads} threads\n")
        print("| operation | times | of the step | mean over busiest | MB read | again |")
        print("|---|---:|---:|---:|---:|---:|")
        for title, group in sorted(groups.items(), key=lambda item: -sum(each.busiest for each in item[1])):
            of_step = sum(each.busiest for each in group) / step
            once, repeated = (sum(getattr(each, f) for each in group) / 1e6 for f in ("bytes", "bytes_again"))
            print(
                f"| {title} | {len(group)} | {of_step:.1%} | {balance(group, threads):.1%} | {once:,.1f} | {repeated:,.1f} |"
            )


def main() -> None:
    """Parse the command line and print."""
    parser = command_parser(__doc__)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREADS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4", "w8a8"), default="none")
    parser.add_argument(
        "--operations", action="store_true", help="list the operations, with the last number of threads"
    )
    args = parser.parse_args()
    if min(args.threads) < 1:
        parser.error(f"--threads has {min(args.threads)}; each must be at least 1")
    setup = Setup(
        rows=[max(rows for rows, _, _ in STEPS.values())],
        context=2048,
        new=1,
        repetitions=0,
        dtype=args.dtype,
        quantization=args.quantization,
    )
    print(f"| step | {' | '.join(f'{n} threads' for n in args.threads)} | barriers | MB once | MB again |")
    print("|---|" + "---:|" * (len(args.threads) + 3))
    runners = {}
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            worker = make_worker(config_of(Path(folder), SHAPES[shape], setup))
        assert isinstance(worker, Worker)
        runner = worker.runner
        assert isinstance(runner, ProgramRunner), "the compiled kernels are not built"
        print("\n".join(rows_of_table(runner, shape, args.threads)), flush=True)
        runners[shape] = worker, runner
    for shape, (_, runner) in runners.items():
        if args.operations:
            print_operations(runner, shape, args.threads[-1])


if __name__ == "__main__":
    main()
