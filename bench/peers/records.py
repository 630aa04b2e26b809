"""The raw results: one line of JSON per measurement, appended as it is made, so that an interrupted run resumes."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

MACHINE = "machine"
"""The name under which the machine's limits are recorded, measured in turn with the engines."""


class Record(msgspec.Struct):
    """One measurement, or one failure."""

    row: str
    engine: str
    repetition: int
    at: str
    """UTC, ISO 8601."""
    figures: dict[str, float] = {}
    error: str = ""
    commit: str = ""
    """Of this repository when it was measured."""


class Machine(msgspec.Struct):
    """Machine of the measurement."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str


class Report(msgspec.Struct):
    """The file of one finished run."""

    date: str
    machine: Machine
    threads: int
    versions: dict[str, dict[str, str]]
    records: list[Record]


def read_records(path: Path) -> list[Record]:
    """Return what an earlier run left; a line cut short by its end is dropped."""
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
    """Add one measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def write_report(path: Path, report: Report) -> None:
    """Write the whole run, readably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def measured(records: Iterable[Record]) -> Mapping[tuple[str, str, int], Record]:
    """Return the newest good measurement of each row, engine and repetition."""
    return {(r.row, r.engine, r.repetition): r for r in records if not r.error}


def failed(records: Sequence[Record]) -> list[Record]:
    """Return the newest failure of each row, engine and repetition that has no good measurement."""
    good = measured(records)
    failures = {(r.row, r.engine, r.repetition): r for r in records if r.error}
    return [failure for key, failure in failures.items() if key not in good]


def this_machine() -> Machine:
    """Describe the machine."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = names[0] if names else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return Machine(cpu, cores, psutil.virtual_memory().total, platform.system(), platform.python_version())


def this_commit() -> str:
    """Return the commit that is measured."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return asked.stdout.strip() or "unknown"
