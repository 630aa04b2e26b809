"""Results of the checklist so far: one JSON file per day and GPU, whole after every row.

Owns the file. Knows not how a row is run, nor what its figures mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from bench.gpu.figures import Figure, number

MAX_SHOWN = 8
"""Figures in a cell of a table."""


class Outcome(StrEnum):
    """Outcome of a row."""

    PASSED = "passed"
    MISSED = "missed a target"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"

    @property
    def was_run(self) -> bool:
        """True if the row need not run again, unless requested."""
        return self is not Outcome.SKIPPED


@dataclass(frozen=True, slots=True)
class Entry:
    """The outcome of one row."""

    outcome: Outcome
    seconds: float
    finished: str
    """ISO date and time."""
    commit: str
    versions: Mapping[str, str]
    figures: list[Figure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)
    """The last lines a row printed that did not pass."""

    def text(self) -> str:
        """Return outcome and figures in a cell of a table: those with a target, or the first few. The file has all."""
        chosen = [figure for figure in self.figures if figure.is_met is not None] or self.figures[:MAX_SHOWN]
        parts = [f"{figure.name} {number(figure.value)} {figure.unit}" for figure in chosen]
        return "; ".join([f"{self.outcome} ({self.finished[:10]}, {self.commit})", *parts])


class Journal:
    """The file, and what it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            self.entries = {name: _entry(row) for name, row in kept["rows"].items()}

    def put(self, name: str, entry: Entry, device: Mapping[str, object]) -> None:
        """Keep a row's outcome, in place of an older one, and write the file: the old one or the new one, never half."""
        self.entries[name] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"device": device, "rows": {name: asdict(each) for name, each in self.entries.items()}}
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(whole, indent=1) + "\n")
        unfinished.replace(self.path)


def _entry(row: dict[str, object]) -> Entry:
    figures = row.pop("figures")
    assert isinstance(figures, list)
    fields: dict[str, object] = {
        **row,
        "outcome": Outcome(str(row["outcome"])),
        "figures": [Figure(**figure) for figure in figures],
    }
    return Entry(**fields)  # type: ignore[arg-type]  # what `put` wrote with `asdict`


def file_name(date: str, gpu: str) -> str:
    """Return the name of the file of a day and a GPU."""
    return f"gpu-{date}-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
