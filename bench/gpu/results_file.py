"""File of the checklist's results: one JSON file per day and GPU, replaced atomically after each row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from bench.gpu.figures import Figure, number

MAX_SHOWN = 8
"""Maximum number of figures in a table cell."""


class Outcome(StrEnum):
    """Outcome of a row."""

    PASSED = "passed"
    MISSED = "missed a target"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"

    @property
    def was_run(self) -> bool:
        """True if the row has run, so that it runs again only on request."""
        return self is not Outcome.SKIPPED


@dataclass(frozen=True, slots=True)
class Entry:
    """Result of one row."""

    outcome: Outcome
    seconds: float
    finished: str
    """ISO date and time."""
    commit: str
    versions: Mapping[str, str]
    figures: list[Figure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)
    """Last lines of the output of a row that did not pass."""

    def text(self) -> str:
        """Return outcome and figures for a table cell: the figures with a target, else the first ones."""
        chosen = [figure for figure in self.figures if figure.is_met is not None] or self.figures[:MAX_SHOWN]
        parts = [f"{figure.name} {number(figure.value)} {figure.unit}" for figure in chosen]
        return "; ".join([f"{self.outcome} ({self.finished[:10]}, {self.commit})", *parts])


class ResultsFile:
    """Results of all rows, stored in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        if path.exists():
            stored = json.loads(path.read_text())
            self.entries = {name: _entry(row) for name, row in stored["rows"].items()}

    def put(self, name: str, entry: Entry, device: Mapping[str, object]) -> None:
        """Store a row's result, and replace the file atomically."""
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
    return Entry(**fields)  # type: ignore[arg-type]  # written by `put` with `asdict`


def file_name(date: str, gpu: str) -> str:
    """Return the file name for a date and a GPU."""
    return f"gpu-{date}-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
