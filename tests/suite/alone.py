"""Tests marked ``alone`` have the machine for themselves: nothing else of a parallel run is tested meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "machine"
"""Under which workers of pytest-xdist are told where the locks are."""


class Locks:
    """The folder with what workers lock; where there are none, nobody is told."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="quintet-tests-")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[FOLDER] = self.folder.name

    def pytest_unconfigure(self) -> None:
        self.folder.cleanup()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures time, so nothing else may run beside it")
    config.pluginmanager.register(Locks(), "locks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    worker = getattr(item.config, "workerinput", None)  # only of a worker of pytest-xdist
    if worker is None:
        return (yield)
    with machine(Path(worker[FOLDER]), item.get_closest_marker("alone") is not None):
        return (yield)


@contextlib.contextmanager
def machine(folder: Path, alone: bool) -> Iterator[None]:
    """Hold the machine with the others of this run, or alone.

    Whoever waits to be alone keeps the door closed meanwhile, so that it is not overtaken for ever.
    """
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
