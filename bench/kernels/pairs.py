"""Compare the linear layers of this checkout with those of another one, in pairs of alternating runs.

    python -m bench.kernels.pairs FOLDER [--formats int4 ...] [--shapes "S down" ...] [--rows 1 4 8 ...] [--cached] [--save FILE]

FOLDER: another built checkout. Both multiply by 96 MiB of equal weights on huge pages, so that caches are cold; with
``--cached``, by one weight repeatedly. Runs take milliseconds and alternate: this, that, that, this, … With one thread, CPU time
is measured, so that other load has little effect. The ratio is the median over pairs of runs; µs are minima. The last column
shows whether the results have the same bits.

If the first number of rows is 1, the table also has each time divided by that of one row: the relative cost of verifying drafts.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import msgspec

from bench.kernels.linear import FORMATS, SHAPES
from bench.kernels.pair_worker import Answer, Case
from bench.overhead.pairs import commit_of
from bench.overhead.run import Machine, machine

THIS = Path(__file__).parents[2]
COLD_BYTES = 96 << 20
ROWS = (1, 2, 4, 6, 8, 16, 32)


class Pair(msgspec.Struct):
    """Results for one format, shape and number of rows: seconds of each run, in order."""

    format: str
    shape: str
    rows: int
    this: list[float]
    that: list[float]
    same_bits: bool

    @property
    def ratio(self) -> float:
        """Median ratio of this checkout's time to the other one's."""
        return median(a / b for a, b in zip(self.this, self.that, strict=True))


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    this: str
    that: str
    machine: Machine
    threads: int
    cached: bool
    pairs: list[Pair]


class PairWorker:
    """Process of `bench.kernels.pair_worker` with the code of a checkout."""

    def __init__(self, folder: Path) -> None:
        """Start the process."""
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("pair_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def ask(self, line: str) -> Answer:
        """Send a line; return the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a worker of the pair ended with status {self._process.wait()}")
        return msgspec.json.decode(answer, type=Answer)

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(
    this: PairWorker, that: PairWorker, case: Case, shape: str, name: str, rows: int, rounds: int
) -> Pair:
    """Measure one number of rows in alternating runs."""
    pair = Pair(name, shape, rows, [], [], True)
    for turn in range(rounds):
        order = [(this, pair.this), (that, pair.that)]
        answers = set()
        for worker, seconds in order if turn % 2 == 0 else reversed(order):
            answer = worker.ask(str(rows))
            seconds.append(answer.seconds)
            answers.add(answer.bits)
        pair.same_bits &= len(answers) == 1
    return pair


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Compare linear layers with those of another checkout.")
    parser.add_argument("that", type=Path, metavar="FOLDER", help="the other built checkout")
    parser.add_argument("--threads", type=int, default=1, help="threads of the kernels (default: 1)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "int8", "w8a8", "int4"])
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["S gate_up", "S down", "M gate_up", "M down"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=12, help="pairs of runs of each case (default: 12)")
    parser.add_argument("--cached", action="store_true", help="multiply by one weight repeatedly")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write all results as JSON")
    arguments = parser.parse_args()
    this, that = PairWorker(THIS), PairWorker(arguments.that.resolve())
    pairs = []
    has_one_row = arguments.rows[0] == 1
    added = "time / that of one row, this and that | " if has_one_row else ""
    print(f"| format | shape | rows | this: µs | that: µs | this / that | {added}bits |")
    print(f"|---|---|---:|---:|---:|---:|{'---:|' if has_one_row else ''}---|")
    for name in arguments.formats:
        for shape in arguments.shapes:
            chosen, (columns, depth) = FORMATS[name], SHAPES[shape]
            size = 0 if arguments.cached else COLD_BYTES
            k, block_bytes = chosen.weight.block(0) or (1, 0)
            row_bytes = depth // k * block_bytes if chosen.has_blocks else 0
            case = Case(
                *(chosen.weight.name, columns, depth, chosen.group, int(chosen.inputs), size),
                *(arguments.threads, row_bytes),
            )
            for worker in (this, that):
                worker.ask(msgspec.json.encode(case).decode())
            one = (0.0, 0.0)
            for rows in arguments.rows:
                pair = compare(this, that, case, shape, name, rows, arguments.rounds)
                pairs.append(pair)
                ours, theirs = min(pair.this) * 1e6, min(pair.that) * 1e6
                bits = "same" if pair.same_bits else "different"
                if rows == 1:
                    one = ours, theirs
                added = f"{ours / one[0]:.2f}, {theirs / one[1]:.2f} | " if has_one_row else ""
                print(
                    f"| {name} | {shape} | {rows} | {ours:,.1f} | {theirs:,.1f} | {pair.ratio:.3f} | {added}{bits} |",
                    flush=True,
                )
    for worker in (this, that):
        worker.end()
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(
            *(date, commit_of(THIS), commit_of(arguments.that), machine()),
            *(arguments.threads, arguments.cached, pairs),
        )
        arguments.save.write_bytes(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
