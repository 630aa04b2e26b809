"""Cost of a run, printed at its end by folder: wall and CPU seconds, with every process started."""

from __future__ import annotations

import resource
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pytest


def processor_s(*scopes: int) -> float:
    """Return the CPU seconds of this process and its reaped children; ``scopes``: of these `getrusage` scopes."""
    used = [resource.getrusage(scope) for scope in scopes or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@dataclass(slots=True)
class Cost:
    """Cost of a group of tests."""

    num_tests: int = 0
    wall_s: float = 0.0
    processor_s: float = 0.0

    def add(self, report: pytest.TestReport) -> None:
        self.num_tests += report.when == "call" or report.skipped
        self.wall_s += report.duration
        self.processor_s += getattr(report, "processor_s", 0.0)  # a worker that died reports none

    def row(self, name: str) -> str:
        return f"{name:24} {self.num_tests or '':>6} {self.wall_s:8.1f} {self.processor_s:10.1f}"


class Costs:
    """Counts in each worker, and sums up in the main process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = time.monotonic()
        self.counted_s = processor_s()
        self.folders: dict[str, Cost] = {}
        self.workers_s = 0.0

    def pytest_collection_finish(self) -> None:
        self.counted_s = processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = processor_s()
        report.processor_s = now - self.counted_s
        self.counted_s = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = PurePosixPath(report.nodeid.partition("::")[0]).parent
        self.folders.setdefault(str(folder), Cost()).add(report)

    def pytest_sessionfinish(self) -> None:
        output = getattr(self.config, "workeroutput", None)  # only in a worker of pytest-xdist
        if output is not None:
            output["processor_s"] = processor_s()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.workers_s += getattr(node, "workeroutput", {}).get("processor_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        option = self.config.option
        suite = "the whole suite" if option.whole else "the fast suite"
        write = terminalreporter.write_line
        terminalreporter.section(f"{suite}, drawn with --seed {option.seed}")
        write(f"{'seconds':24} {'tests':>6} {'clock':>8} {'processor':>10}")
        for folder, cost in sorted(self.folders.items()):
            write(cost.row(folder))
        tests = Cost(
            sum(cost.num_tests for cost in self.folders.values()),
            sum(cost.wall_s for cost in self.folders.values()),
            sum(cost.processor_s for cost in self.folders.values()),
        )
        total_s = self.workers_s + processor_s(resource.RUSAGE_SELF) if self.workers_s else processor_s()
        write(Cost(0, 0.0, total_s - tests.processor_s).row("collection and overhead"))
        write(Cost(tests.num_tests, time.monotonic() - self.started, total_s).row("total"))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config), "costs")
