"""Raw results: each measurement appends a line of JSON, so that an interrupted run resumes."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

MACHINE = "machine"
"""Engine name of the records of the machine's limits."""


class Record(msgspec.Struct):
    """Result of one measurement, or its error."""

    row: str
    engine: str
    repetition: int
    at: str
    """Time in UTC, ISO 8601."""
    figures: dict[str, float] = {}
    error: str = ""
    commit: str = ""
    """Commit of this repository at the measurement."""


class Machine(msgspec.Struct):
    """Machine of the measurement."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str


class Report(msgspec.Struct):
    """Contents of the result file of a run."""

    date: str
    machine: Machine
    threads: int
    versions: dict[str, dict[str, str]]
    records: list[Record]


def read_records(path: Path) -> list[Record]:
    """Return the records of a file; an incomplete last line is dropped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(msgspec.json.decode(line, type=Record))
        except msgspec.DecodeError:
            continue
    return records


def append_record(path: Path, record: Record) -> None:
    """Append a record to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def write_report(path: Path, report: Report) -> None:
    """Write the report as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def measured(records: Iterable[Record]) -> Mapping[tuple[str, str, int], Record]:
    """Return the newest successful record of each row, engine and repetition."""
    return {(r.row, r.engine, r.repetition): r for r in records if not r.error}


def failed(records: Sequence[Record]) -> list[Record]:
    """Return the newest failure of each row, engine and repetition without a successful record."""
    good = measured(records)
    failures = {(r.row, r.engine, r.repetition): r for r in records if r.error}
    return [failure for key, failure in failures.items() if key not in good]


def this_machine() -> Machine:
    """Return a description of this machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = names[0] if names else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return Machine(cpu, cores, psutil.virtual_memory().total, platform.system(), platform.python_version())


def this_commit() -> str:
    """Return the commit of this checkout."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return described.stdout.strip() or "unknown"
