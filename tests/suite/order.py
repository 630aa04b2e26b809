"""Order of test files: long ones first, waiting ones between computing ones.

Workers take whole files. A long file at the end would leave the other workers idle. Servers all at once would leave
the processors idle while they wait, and overload them otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.suite.packages import package_of

WAITING = ("chaos", "processes", "deploy", "api")
COMPUTING = ("models", "cuda", "executor", "suite", "bench")
"""Folders with long files first; all others are last."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    items[:] = itertools.chain.from_iterable(by_file[path] for path in in_order(list(by_file)))


def in_order(paths: Sequence[Path]) -> list[Path]:
    """Return test files in their order of execution."""
    waiting, computing = (
        [path for name in names for path in paths if package_of(path) == name]
        for names in (WAITING, COMPUTING)
    )
    pairs = itertools.zip_longest(waiting, computing)
    first = [path for pair in pairs for path in pair if path is not None]
    return first + [path for path in paths if path not in first]
