"""Figures and remarks of a row of the GPU checklist, as lines of JSON that are written at once.

A row's process writes the lines and `bench.gpu.check` reads them, also after a crash of the process.
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
    """A measured value and its target."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    remark: str = ""
    """Conditions of the measurement, such as shared blocks."""

    @property
    def is_met(self) -> bool | None:
        """True if the value meets its target; None without a target. NaN meets no target."""
        if self.at_least is None and self.at_most is None:
            return None
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def text(self) -> str:
        """Return the figure as a line of text."""
        words = f"{self.name:<44} {number(self.value):>12} {self.unit:<9}"
        for sign, bound in (("≥", self.at_least), ("≤", self.at_most)):
            if bound is not None:
                words += f" (target {sign} {number(bound)} {self.unit}: {'met' if self.is_met else 'MISSED'})"
        return f"{words} {self.remark}".rstrip()


def number(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Report:
    """Print figures and remarks, and append them to a file as lines of JSON."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def figure(self, figure: Figure) -> None:
        """Report a figure."""
        print(figure.text(), flush=True)
        self._append({"figure": asdict(figure)})

    def remark(self, words: str) -> None:
        """Report a text."""
        print(words, flush=True)
        self._append({"remark": words})

    def note_current(self, words: str) -> None:
        """Write the name of the current test to a file next to the figures, replacing the previous one."""
        if self._path is not None:
            self._path.with_suffix(".current").write_text(words)

    def _append(self, line: dict[str, object]) -> None:
        if self._path is None:
            return
        with self._path.open("a") as file:  # sync each line, since the process may be killed
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_lines(lines: Iterable[str]) -> tuple[list[Figure], list[str]]:
    """Return the figures and remarks of a file of `Report`; an incomplete line is skipped."""
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
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="also append figures to this file, as lines of JSON"
    )
