"""Run the GPU checklist of docs/gpu.md, row by row, and keep what it finds.

    make gpu-check                                      # every row not yet run today on this GPU
    python bench/gpu/check.py --list                    # the rows, and what is known of them
    python bench/gpu/check.py --only decode prefill     # these
    python bench/gpu/check.py --again --only decode     # this one, although it has an outcome
    python bench/gpu/check.py --budget-minutes 9        # as many as fit; the next call resumes
    python bench/gpu/check.py --device cpu --only decode   # toy shapes on the CPU: debugs the rows, measures nothing

Works with any Python that has the packages (torch, cupy, transformers, pytest ...): rows with missing packages are
skipped, and the line says which. Each row runs in processes of its own with a time limit; whatever becomes of it is written
at once to ``bench/results/gpu-<date>-<gpu>.json``, and its output to ``build/gpu-check/<row>.log``. Exit status 0: every row
asked for has passed; 1: some have not; 2: no GPU.
"""

from __future__ import annotations

import datetime
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "src"),
]  # run as a file, by a Python that has not installed this package

from bench.arguments import command_parser  # noqa: E402
from bench.gpu import machine  # noqa: E402
from bench.gpu.child import Ended, run  # noqa: E402
from bench.gpu.figures import Figure, read_lines  # noqa: E402
from bench.gpu.journal import Entry, Journal, Outcome, file_name  # noqa: E402
from bench.gpu.rows import ROWS, Row, rows_of  # noqa: E402

NUM_TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class Place:
    """Folders of rows and of their outputs."""

    device: str
    logs: Path
    facts: Mapping[str, object]
    versions: Mapping[str, str]
    commit: str

    @property
    def num_gpus(self) -> int:
        """Of a CPU, which debugs rows, as many as anybody wants."""
        return int(str(self.facts.get("gpus", 1))) if self.device == "cuda" else 1 << 30

    def skipped(self, why: str) -> Entry:
        """Return what the journal keeps of a row that cannot run here."""
        return Entry(Outcome.SKIPPED, 0.0, "", self.commit, self.versions, remarks=[why])

    def entry(
        self, outcome: Outcome, seconds: float, output: RowOutput | None = None, tail: Sequence[str] = ()
    ) -> Entry:
        """Return what the journal keeps of a row that has just ended."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        figures, remarks = (output.figures, output.remarks) if output else ([], [])
        return Entry(
            outcome, round(seconds, 1), now, self.commit, self.versions, figures, remarks, list(tail)
        )


class RowOutput:
    """Figures and remarks of a running row, from the file it appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)
        self.figures: list[Figure] = []
        self.remarks: list[str] = []

    def print_news(self) -> None:
        """Print what has come since the last call."""
        if not self._path.exists():
            return
        whole = self._path.read_text().rpartition("\n")[0]
        figures, remarks = read_lines(whole.splitlines())
        for words in remarks[len(self.remarks) :]:
            print(f"      {words}", flush=True)
        for figure in figures[len(self.figures) :]:
            print(f"      {figure.text()}", flush=True)
        self.figures, self.remarks = figures, remarks


TOY_TESTS = ("--share", "0.25", "--seed", "1")
"""Options of pytest for toys: a drawn share of each file's tests, the same in each rehearsal."""


def run_row(row: Row, place: Place, limit_s: float, is_last_call: bool = False) -> Entry | None:
    """Run one row; return None when ``limit_s`` ended it before its own time limit did, unless there is no other call."""
    if lacking := machine.lacking(
        module for module in row.needs if place.device != "cpu" or module != "cupy"
    ):
        print(f"      skipped: this Python has no {', '.join(lacking)}", flush=True)
        return place.skipped(f"missing: {', '.join(lacking)}")
    if place.num_gpus < row.gpus:
        print(f"      skipped: it takes {row.gpus} GPUs, and there are {place.num_gpus}", flush=True)
        return place.skipped(f"takes {row.gpus} GPUs")
    place.logs.mkdir(parents=True, exist_ok=True)
    log, output = place.logs / f"{row.name}.log", RowOutput(place.logs / f"{row.name}.figures")
    words = list(row.command)
    if place.device == "cpu" and "--whole" in words:  # an emulated kernel is slow: `make test` runs the rest
        at = words.index("--whole")
        words[at : at + 1] = TOY_TESTS
    command = [sys.executable, *words, "--device", place.device]
    command += ["--figures", str(place.logs / f"{row.name}.figures")]
    ended = run(command, ROOT, machine.environment(), log, min(row.limit_s, limit_s), output.print_news)
    outcome = outcome_of(ended, output.figures, place.device)
    if outcome is Outcome.TIMED_OUT and limit_s < row.limit_s and not is_last_call:
        return None
    tail = [] if outcome is Outcome.PASSED else log.read_text(errors="replace").splitlines()[-NUM_TAIL_LINES:]
    if outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
        print("\n".join(f"      | {line}" for line in tail))
    return place.entry(outcome, ended.seconds, output, tail)


def outcome_of(ended: Ended, figures: Sequence[Figure], device: str) -> Outcome:
    """Say what a row's end means. Targets are the GPU's: on a CPU they say nothing."""
    if ended.status is None:
        return Outcome.TIMED_OUT
    if ended.status:
        return Outcome.FAILED
    missed = device == "cuda" and any(figure.is_met is False for figure in figures)
    return Outcome.MISSED if missed else Outcome.PASSED


def run_rows(
    rows: Sequence[Row],
    journal: Journal,
    place: Place,
    again: bool,
    budget_s: float,
    is_last_call: bool = False,
) -> None:
    """Run those of ``rows`` that have no outcome yet, or all of them, until the budget is spent.

    is_last_call: begin rows whatever they take, and record one that the budget ends as timed out.
    """
    deadline = time.monotonic() + budget_s
    for number, row in enumerate(rows, 1):
        known = journal.entries.get(row.name)
        head = f"[{number:2}/{len(rows)}] {row.name}"
        if known is not None and known.outcome.was_run and not again:
            print(f"{head}: {known.outcome} before (--again runs it again)", flush=True)
            continue
        left_s = deadline - time.monotonic()
        takes_s = max(known.seconds, 5) if known and known.outcome.was_run else row.takes_s
        if left_s < (0 if is_last_call else takes_s):
            print(f"{head}: not begun, {left_s:.0f} s are left and it takes about {takes_s:.0f}", flush=True)
            continue
        print(f"{head}: {row.shows}", flush=True)
        entry = run_row(row, place, left_s, is_last_call)
        if entry is None:
            print("      broken off: the budget is spent", flush=True)
            continue
        if not entry.outcome.was_run and known is not None and known.outcome.was_run:
            continue  # another Python could run it: that stays
        journal.put(row.name, entry, place.facts)
        if entry.outcome.was_run:
            print(f"      {entry.outcome} in {entry.seconds:.0f} s", flush=True)


def list_rows(rows: Sequence[Row], journal: Journal) -> None:
    """Print the rows with what is known of them, as docs/gpu.md has them."""
    print("| Row | Shows | Target | Command | Result |\n|---|---|---|---|---|")
    for row in rows:
        entry = journal.entries.get(row.name)
        result = "not yet run on a GPU" if entry is None else entry.text()
        print(f"| `{row.name}` | {row.shows} | {row.target} | `{row.words}` | {result} |")


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through every ``finally``: a row's processes are killed there."""
    raise SystemExit(128 + number)


def main() -> int:
    """Parse the command line and run."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    parser = command_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows")
    parser.add_argument("--again", action="store_true", help="also rows that have an outcome already")
    parser.add_argument("--list", action="store_true", help="show the rows and their outcomes; run nothing")
    parser.add_argument(
        "--budget-minutes", type=float, default=float("inf"), help="begin no row that takes longer"
    )
    parser.add_argument(
        "--seconds", type=float, help="end after so long; a row that is running then counts as timed out"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="file to resume (default: of today and this GPU)"
    )
    parser.add_argument(
        "--logs", type=Path, default=ROOT / "build" / "gpu-check", help="folder of the rows' output"
    )
    parser.add_argument("--commit", help="what the results say (default: what git says)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: toy shapes, to debug the rows"
    )
    arguments = parser.parse_args()
    try:
        rows = rows_of(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    facts = machine.describe_device()
    if arguments.device == "cpu":
        facts |= {"gpu": "none: cpu"}
    elif not facts["available"] and not arguments.list:
        print(
            f"No GPU: {facts.get('error', 'torch sees no CUDA device')}. The checklist needs one; the CPU's tests are"
            " `make test`, and --device cpu debugs the rows on toy shapes."
        )
        return 2
    today, gpu = datetime.date.today().isoformat(), str(facts.get("gpu", "none"))
    results = arguments.logs if arguments.device == "cpu" else ROOT / "bench" / "results"
    journal = Journal(arguments.results or results / file_name(today, gpu))
    if arguments.list:
        list_rows(rows, journal)
        return 0
    place = Place(
        arguments.device, arguments.logs, facts, machine.versions(), arguments.commit or machine.commit()
    )
    print(f"{gpu}, {len(rows)} of {len(ROWS)} rows; results: {journal.path}", flush=True)
    budget_s = arguments.budget_minutes * 60 if arguments.seconds is None else arguments.seconds
    run_rows(rows, journal, place, arguments.again, budget_s, arguments.seconds is not None)
    outcomes = [journal.entries[row.name].outcome if row.name in journal.entries else None for row in rows]
    counts = {str(each or "not run"): outcomes.count(each) for each in dict.fromkeys(outcomes)}
    print(", ".join(f"{count} {words}" for words, count in counts.items()))
    return 0 if set(outcomes) == {Outcome.PASSED} else 1


if __name__ == "__main__":
    sys.exit(main())
