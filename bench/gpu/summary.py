"""Write the summary of a stage: a text of at most 9 000 characters, and a JSON file for ``bench/results``.

The input is the folder of logs: ``*.figures`` (`bench.gpu.figures`), ``rows-*.json`` (`bench.gpu.results_file`), and logs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.figures import Figure, read_lines
from bench.gpu.results_file import Entry, Outcome, ResultsFile

MAX_CHARS = 9000
TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job of a stage."""

    name: str
    status: int | None
    """Exit status; None for a job that ran out of time or was not run."""
    seconds: float
    used_fallback: bool

    def text(self) -> str:
        """Return the result as a line of text."""
        words = {0: "passed", None: "OUT OF TIME"}.get(self.status, f"FAILED ({self.status})")
        return f"{self.name}: {words}{' with its fallback' * self.used_fallback}, {self.seconds:.0f} s"


def entries_of(logs: Path) -> dict[str, Entry]:
    """Return the results of all rows of the checklist, by name."""
    found: dict[str, Entry] = {}
    for path in sorted(logs.glob("rows-*.json")):
        found |= ResultsFile(path).entries
    return found


def figures_of(logs: Path) -> dict[str, tuple[list[Figure], list[str]]]:
    """Return figures and remarks by job, for jobs other than checklist rows."""
    return {
        path.stem: read_lines(path.read_text(errors="replace").splitlines())
        for path in sorted(logs.glob("*.figures"))
    }


def write_results(logs: Path, jobs: Sequence[JobResult], target: Path) -> None:
    """Write all results, figures and remarks as JSON."""
    devices = [json.loads(path.read_text())["device"] for path in sorted(logs.glob("rows-*.json"))]
    whole = {
        "device": devices[0] if devices else {},
        "jobs": [asdict(job) for job in jobs],
        "rows": {name: asdict(entry) for name, entry in entries_of(logs).items()},
        "figures": {
            name: {"figures": [asdict(figure) for figure in figures], "remarks": remarks}
            for name, (figures, remarks) in figures_of(logs).items()
        },
    }
    target.write_text(json.dumps(whole, indent=1) + "\n")


def summarise(logs: Path, jobs: Sequence[JobResult]) -> str:
    """Return the text: jobs, failures with their last lines, then figures; truncated to `MAX_CHARS`."""
    lines = [job.text() for job in jobs]
    entries = entries_of(logs)
    lines += [f"row {name}: {entry.outcome}, {entry.seconds:.0f} s" for name, entry in entries.items()]
    for name, entry in entries.items():
        if entry.outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
            lines += [f"-- {name}", *(f"   {words[:300]}" for words in entry.remarks[:8])]
            lines += [f"   | {line[:200]}" for line in entry.tail[-TAIL_LINES:]]
    for job in jobs:
        log = logs / f"{job.name}.log"
        if job.status != 0 and log.exists() and not job.name.startswith("rows-"):
            tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            lines += [f"-- {job.name}.log", *(f"   | {line[:200]}" for line in tail)]
    for name, (figures, remarks) in figures_of(logs).items():
        lines.append(f"-- {name}")
        lines += [f"   {figure.text()}" for figure in figures if not figure.name.startswith("smoke")]
        lines += [f"   {line[:160]}" for remark in remarks for line in remark.splitlines()]
    for entry in entries.values():
        lines += [f"   {figure.text()}" for figure in entry.figures]
    text = "\n".join(lines)
    return (
        text
        if len(text) <= MAX_CHARS
        else text[: MAX_CHARS - 40] + "\n... cut: see results.json, logs.tar.gz"
    )
