"""Results of a row of the GPU checklist: figures and remarks, each written on its own line at once.

Owns the line format between a row's process and `bench.gpu.check`, which keeps the lines however the process ends.
Knows neither rows nor devices.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, with what it should reach."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    remark: str = ""
    """Conditions for a comparison: shared blocks, another method."""

    @property
    def is_met(self) -> bool | None:
        """True if the target was reached; None without one. A value that is no number reaches none."""
        if self.at_least is None and self.at_most is None:
            return None
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def text(self) -> str:
        """Return the line that people read."""
        words = f"{self.name:<44} {number(self.value):>12} {self.unit:<9}"
        for sign, bound in (("≥", self.at_least), ("≤", self.at_most)):
            if bound is not None:
                words += f" (target {sign} {number(bound)} {self.unit}: {'met' if self.is_met else 'MISSED'})"
        return f"{words} {self.remark}".rstrip()


def number(value: float) -> str:
    """Write a number with four digits that count."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Report:
    """Prints figures and remarks, and appends them to the file that the checklist reads, one JSON object a line."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def figure(self, figure: Figure) -> None:
        """Tell a figure."""
        print(figure.text(), flush=True)
        self._append({"figure": asdict(figure)})

    def remark(self, words: str) -> None:
        """Tell what is no number."""
        print(words, flush=True)
        self._append({"remark": words})

    def note_current(self, words: str) -> None:
        """Keep what is being done now in a file beside the figures, in place of what was done before."""
        if self._path is not None:
            self._path.with_suffix(".current").write_text(words)

    def _append(self, line: dict[str, object]) -> None:
        if self._path is None:
            return
        with self._path.open(
            "a"
        ) as file:  # whole lines, at once on the disk: the process may be killed after it
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_lines(lines: Iterable[str]) -> tuple[list[Figure], list[str]]:
    """Return the figures and remarks of a file that `Report` wrote; a line that was cut off is left out."""
    figures, remarks = [], []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "figure" in entry:
            figures.append(Figure(**entry["figure"]))
        else:
            remarks.append(entry["remark"])
    return figures, remarks


def add_report_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--figures``, which `bench.gpu.check` gives to every row."""
    parser.add_argument("--figures", type=Path, metavar="FILE", help="append figures here too, as JSON lines")
