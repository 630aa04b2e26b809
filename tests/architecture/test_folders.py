"""Folders are small enough to read: at most 25 source files each."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 25
SOURCES = {".py", ".cpp", ".hpp", ".cu", ".cuh"}
EXCEPTIONS = {
    "csrc/cuda": "the name of a CUDA module is its path; headers are inlined by name",
    "bench/gpu": "one folder of commands that are copied to a machine with a GPU",
}
"""Folders with more files, each with its reason."""


def test_no_folder_has_more_than_25_source_files() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [PurePosixPath(name) for name in listed.stdout.splitlines()]
    counts = Counter(
        str(path.parent) for path in paths if path.suffix in SOURCES and path.name != "__init__.py"
    )
    large = {folder for folder, count in counts.items() if count > MOST_FILES}
    assert large == set(EXCEPTIONS), {folder: counts[folder] for folder in large ^ set(EXCEPTIONS)}
