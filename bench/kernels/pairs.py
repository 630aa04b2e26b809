"""Linear layers of this checkout beside another one's, in turns within one run: what a change made of each.

    python -m bench.kernels.pairs FOLDER [--formats int4 ...] [--shapes "S down" ...] [--rows 1 4 8 ...] [--cached] [--save FILE]

FOLDER: another checkout, built. Both pass over weights of the same numbers on huge pages, 96 MiB of them, so that none is in a
cache when its turn comes (`--cached`: over one weight again and again), in turns of some milliseconds: this, that, that, this, …
On one thread what the processor worked counts, not what passed, so that it can be run beside others. The ratio is the median of
adjacent turns; µs are each one's best. Says also whether the results' bits are the same.

If the first of the rows is 1, the table also has each time over that of one row: what a step costs that verifies drafts.
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
from bench.kernels.member import Answer, Case
from bench.overhead.pairs import commit_of
from bench.overhead.run import Machine, machine

THIS = Path(__file__).parents[2]
COLD_BYTES = 96 << 20
ROWS = (1, 2, 4, 6, 8, 16, 32)


class Pair(msgspec.Struct):
    """One format, shape and number of rows; seconds of each turn, in their order."""

    format: str
    shape: str
    rows: int
    this: list[float]
    that: list[float]
    same_bits: bool

    @property
    def ratio(self) -> float:
        """This one's time over that one's."""
        return median(a / b for a, b in zip(self.this, self.that, strict=True))


class Report(msgspec.Struct):
    """The file."""

    date: str
    this: str
    that: str
    machine: Machine
    threads: int
    cached: bool
    pairs: list[Pair]


class Member:
    """The process of a checkout."""

    def __init__(self, folder: Path) -> None:
        """Start it; nothing is measured yet."""
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("member.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def ask(self, line: str) -> Answer:
        """Return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a member of the pair ended with status {self._process.wait()}")
        return msgspec.json.decode(answer, type=Answer)

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(this: Member, that: Member, case: Case, shape: str, name: str, rows: int, rounds: int) -> Pair:
    """Time one number of rows in turns."""
    pair = Pair(name, shape, rows, [], [], True)
    for turn in range(rounds):
        order = [(this, pair.this), (that, pair.that)]
        answers = set()
        for member, seconds in order if turn % 2 == 0 else reversed(order):
            answer = member.ask(str(rows))
            seconds.append(answer.seconds)
            answers.add(answer.bits)
        pair.same_bits &= len(answers) == 1
    return pair


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Time linear layers beside another checkout's.")
    parser.add_argument("that", type=Path, metavar="FOLDER", help="the other checkout, built")
    parser.add_argument("--threads", type=int, default=1, help="threads of the kernels (default: 1)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "int8", "w8a8", "int4"])
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["S gate_up", "S down", "M gate_up", "M down"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=12, help="pairs of each (default: 12)")
    parser.add_argument("--cached", action="store_true", help="one weight again and again")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all of it as JSON too")
    arguments = parser.parse_args()
    this, that = Member(THIS), Member(arguments.that.resolve())
    pairs = []
    of_one = arguments.rows[0] == 1
    added = "over one row, this and that | " if of_one else ""
    print(f"| format | shape | rows | this: µs | that: µs | this over that | {added}bits |")
    print(f"|---|---|---:|---:|---:|---:|{'---:|' if of_one else ''}---|")
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
            for member in (this, that):
                member.ask(msgspec.json.encode(case).decode())
            one = (0.0, 0.0)
            for rows in arguments.rows:
                pair = compare(this, that, case, shape, name, rows, arguments.rounds)
                pairs.append(pair)
                mine, its = min(pair.this) * 1e6, min(pair.that) * 1e6
                bits = "same" if pair.same_bits else "others"
                if rows == 1:
                    one = mine, its
                added = f"{mine / one[0]:.2f}, {its / one[1]:.2f} | " if of_one else ""
                print(
                    f"| {name} | {shape} | {rows} | {mine:,.1f} | {its:,.1f} | {pair.ratio:.3f} | {added}{bits} |",
                    flush=True,
                )
    for member in (this, that):
        member.end()
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(
            *(date, commit_of(THIS), commit_of(arguments.that), machine()),
            *(arguments.threads, arguments.cached, pairs),
        )
        arguments.save.write_bytes(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
