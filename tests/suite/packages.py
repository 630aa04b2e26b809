"""Folders of `tests`."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def package_of(path: Path) -> str:
    """Return the folder of `tests` that contains a file, also through subfolders."""
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else path.parent.name
