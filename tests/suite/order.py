"""In which order files are tested: long ones first, and those that wait between those that compute.

Workers take whole files. Were a long one the last, the others would have nothing to do meanwhile; were all servers tested at
once, the processors would have little to do while they wait, and too much when they do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.suite.packages import package_of

WAITING = ("chaos", "processes", "deploy", "api")
COMPUTING = ("models", "cuda", "executor", "suite", "bench")
"""Folders, those of long files first; all others come at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    items[:] = itertools.chain.from_iterable(by_file[path] for path in in_order(list(by_file)))


def in_order(paths: Sequence[Path]) -> list[Path]:
    """Return files of tests in the order in which they are to begin."""
    waiting, computing = (
        [path for name in names for path in paths if package_of(path) == name]
        for names in (WAITING, COMPUTING)
    )
    pairs = itertools.zip_longest(waiting, computing)
    first = [path for pair in pairs for path in pair if path is not None]
    return first + [path for path in paths if path not in first]
