"""Run the GPU checklist of docs/gpu.md, row by row, and record the results.

    make gpu-check                                      # all rows without a result of today on this GPU
    python bench/gpu/check.py --list                    # list the rows and their results
    python bench/gpu/check.py --only decode prefill     # run these rows
    python bench/gpu/check.py --again --only decode     # run this row again
    python bench/gpu/check.py --budget-minutes 9        # run as many rows as fit; the next call resumes
    python bench/gpu/check.py --device cpu --only decode   # toy shapes on the CPU, to debug the rows

Works with any Python that has the packages (torch, cupy, transformers, pytest and others). Rows with missing packages are
skipped; the output names the packages. Each row runs in separate processes with a time limit. Its result is written at once to
``bench/results/gpu-<date>-<gpu>.json``, and its output to ``build/gpu-check/<row>.log``. Exit status 0: all selected rows passed;
1: some did not; 2: no GPU.
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
]  # for a run as a script, without an installed package

from bench.arguments import command_parser  # noqa: E402
from bench.gpu import machine  # noqa: E402
from bench.gpu.child_process import ProcessResult, run  # noqa: E402
from bench.gpu.figures import Figure, read_lines  # noqa: E402
from bench.gpu.results_file import Entry, Outcome, ResultsFile, file_name  # noqa: E402
from bench.gpu.rows import ROWS, Row, rows_of  # noqa: E402

NUM_TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class CheckRun:
    """Device, folders and versions of a checklist run."""

    device: str
    logs: Path
    facts: Mapping[str, object]
    versions: Mapping[str, str]
    commit: str

    @property
    def num_gpus(self) -> int:
        """Number of GPUs; unlimited on a CPU, which only debugs the rows."""
        return int(str(self.facts.get("gpus", 1))) if self.device == "cuda" else 1 << 30

    def skipped(self, reason: str) -> Entry:
        """Return the result of a row that cannot run here."""
        return Entry(Outcome.SKIPPED, 0.0, "", self.commit, self.versions, remarks=[reason])

    def entry(
        self, outcome: Outcome, seconds: float, output: RowOutput | None = None, tail: Sequence[str] = ()
    ) -> Entry:
        """Return the result of a row that has just ended."""
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

    def print_new(self) -> None:
        """Print the figures and remarks since the last call."""
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
"""Options of pytest on a CPU: a random sample of each file's tests, the same in each rehearsal."""


def run_row(row: Row, check_run: CheckRun, limit_s: float, is_last_call: bool = False) -> Entry | None:
    """Run one row. Return None if ``limit_s`` ended it before its own time limit, unless this is the last call."""
    if missing_packages := machine.missing_packages(
        module for module in row.needs if check_run.device != "cpu" or module != "cupy"
    ):
        print(f"      skipped: missing packages: {', '.join(missing_packages)}", flush=True)
        return check_run.skipped(f"missing: {', '.join(missing_packages)}")
    if check_run.num_gpus < row.gpus:
        print(f"      skipped: needs {row.gpus} GPUs, found {check_run.num_gpus}", flush=True)
        return check_run.skipped(f"needs {row.gpus} GPUs")
    check_run.logs.mkdir(parents=True, exist_ok=True)
    log, output = check_run.logs / f"{row.name}.log", RowOutput(check_run.logs / f"{row.name}.figures")
    words = list(row.command)
    if (
        check_run.device == "cpu" and "--whole" in words
    ):  # an emulated kernel is slow: `make test` runs the rest
        index = words.index("--whole")
        words[index : index + 1] = TOY_TESTS
    command = [sys.executable, *words, "--device", check_run.device]
    command += ["--figures", str(check_run.logs / f"{row.name}.figures")]
    process_result = run(
        command, ROOT, machine.environment(), log, min(row.limit_s, limit_s), output.print_new
    )
    outcome = outcome_of(process_result, output.figures, check_run.device)
    if outcome is Outcome.TIMED_OUT and limit_s < row.limit_s and not is_last_call:
        return None
    tail = [] if outcome is Outcome.PASSED else log.read_text(errors="replace").splitlines()[-NUM_TAIL_LINES:]
    if outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
        print("\n".join(f"      | {line}" for line in tail))
    return check_run.entry(outcome, process_result.seconds, output, tail)


def outcome_of(process_result: ProcessResult, figures: Sequence[Figure], device: str) -> Outcome:
    """Return the outcome of a row's process. Targets apply to GPUs only."""
    if process_result.status is None:
        return Outcome.TIMED_OUT
    if process_result.status:
        return Outcome.FAILED
    missed = device == "cuda" and any(figure.is_met is False for figure in figures)
    return Outcome.MISSED if missed else Outcome.PASSED


def run_rows(
    rows: Sequence[Row],
    results: ResultsFile,
    check_run: CheckRun,
    again: bool,
    budget_s: float,
    is_last_call: bool = False,
) -> None:
    """Run the rows without a result, or all with ``again``, until the time budget is spent.

    is_last_call: begin rows regardless of their duration, and record a row that the budget ends as timed out.
    """
    deadline = time.monotonic() + budget_s
    for number, row in enumerate(rows, 1):
        known = results.entries.get(row.name)
        head = f"[{number:2}/{len(rows)}] {row.name}"
        if known is not None and known.outcome.was_run and not again:
            print(f"{head}: {known.outcome} earlier (--again runs it again)", flush=True)
            continue
        left_s = deadline - time.monotonic()
        takes_s = max(known.seconds, 5) if known and known.outcome.was_run else row.takes_s
        if left_s < (0 if is_last_call else takes_s):
            print(f"{head}: not run: needs about {takes_s:.0f} s, {left_s:.0f} s remain", flush=True)
            continue
        print(f"{head}: {row.shows}", flush=True)
        entry = run_row(row, check_run, left_s, is_last_call)
        if entry is None:
            print("      aborted: the time budget is spent", flush=True)
            continue
        if not entry.outcome.was_run and known is not None and known.outcome.was_run:
            continue  # keep the result of another Python
        results.put(row.name, entry, check_run.facts)
        if entry.outcome.was_run:
            print(f"      {entry.outcome} in {entry.seconds:.0f} s", flush=True)


def list_rows(rows: Sequence[Row], results: ResultsFile) -> None:
    """Print the rows and their results as the table of docs/gpu.md."""
    print("| Row | Shows | Target | Command | Result |\n|---|---|---|---|---|")
    for row in rows:
        entry = results.entries.get(row.name)
        result = "not yet run on a GPU" if entry is None else entry.text()
        print(f"| `{row.name}` | {row.shows} | {row.target} | `{row.words}` | {result} |")


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM: raise SystemExit, so that ``finally`` blocks kill the row's processes."""
    raise SystemExit(128 + number)


def main() -> int:
    """Parse the command line and run."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    parser = command_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="run only these rows")
    parser.add_argument("--again", action="store_true", help="also run rows that have a result")
    parser.add_argument("--list", action="store_true", help="list the rows and their results; run nothing")
    parser.add_argument(
        "--budget-minutes",
        type=float,
        default=float("inf"),
        help="time budget; rows that need more than the rest are not begun",
    )
    parser.add_argument(
        "--seconds", type=float, help="time limit of the call; a row that it ends counts as timed out"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="result file to resume (default: that of today and this GPU)",
    )
    parser.add_argument(
        "--logs", type=Path, default=ROOT / "build" / "gpu-check", help="folder of the rows' output"
    )
    parser.add_argument("--commit", help="commit in the results (default: that of the checkout)")
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
            f"No GPU: {facts.get('error', 'torch finds no CUDA device')}. The checklist needs a GPU; `make test` runs the tests"
            " of the CPU, and --device cpu debugs the rows on toy shapes."
        )
        return 2
    today, gpu = datetime.date.today().isoformat(), str(facts.get("gpu", "none"))
    folder = arguments.logs if arguments.device == "cpu" else ROOT / "bench" / "results"
    results = ResultsFile(arguments.results or folder / file_name(today, gpu))
    if arguments.list:
        list_rows(rows, results)
        return 0
    check_run = CheckRun(
        arguments.device, arguments.logs, facts, machine.versions(), arguments.commit or machine.commit()
    )
    print(f"{gpu}, {len(rows)} of {len(ROWS)} rows; results: {results.path}", flush=True)
    budget_s = arguments.budget_minutes * 60 if arguments.seconds is None else arguments.seconds
    run_rows(rows, results, check_run, arguments.again, budget_s, arguments.seconds is not None)
    outcomes = [results.entries[row.name].outcome if row.name in results.entries else None for row in rows]
    counts = {str(each or "not run"): outcomes.count(each) for each in dict.fromkeys(outcomes)}
    print(", ".join(f"{count} {words}" for words, count in counts.items()))
    return 0 if set(outcomes) == {Outcome.PASSED} else 1


if __name__ == "__main__":
    sys.exit(main())
