"""Fixtures of the GPU tests: the real device, the report for the checklist, and the kernel tests of tests/cuda.

`pytest tests/gpu` needs a GPU. `pytest tests/gpu --device cpu` runs the same tests on the CPU with emulated kernels: it
debugs the tests only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from bench.gpu.figures import Report

from quintet.executor.backends.cuda.device import Device
from quintet.wire.config import ExecutorConfig

KERNEL_TESTS = Path(__file__).resolve().parents[1] / "cuda"
COLLECTOR = "test_kernels.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options that `bench.gpu.check` passes to every row."""
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: debug these tests")
    parser.addoption("--only-id", default=None, help="run the test of this id alone; of tests/cuda too")
    parser.addoption("--figures", type=Path, default=None, help="append figures here, as JSON lines")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Exit without a GPU, since a session with all tests skipped would look like a success."""
    if session.config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        pytest.exit("torch sees no CUDA device; `--device cpu` debugs these tests without one", returncode=2)


class KernelTests(pytest.File):
    """The tests of tests/cuda, collected under this folder, so that they use the `device` fixture of this file."""

    def collect(self) -> Iterable[pytest.Collector]:
        """Return their modules."""
        only = self.config.getoption("--only-id")
        for path in sorted(KERNEL_TESTS.rglob("test_*.py")):
            if only is not None and f"{path.name}::" not in only:
                continue
            yield pytest.Module.from_parent(self, path=path)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the kernel tests for the file that stands in for them."""
    if file_path.name != COLLECTOR:
        return None
    collector: pytest.Collector = KernelTests.from_parent(parent, path=file_path)
    return collector


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that launch nothing, or that provoke errors only the emulator survives."""
    left_out = [item for item in items if KERNEL_TESTS in item.path.parents and not takes_any_device(item)]
    config.hook.pytest_deselected(items=left_out)
    only = config.getoption("--only-id")
    items[:] = [item for item in items if item not in left_out and only in (None, item.nodeid)]


def takes_any_device(item: pytest.Item) -> bool:
    """Return whether a test of tests/cuda uses the `device` fixture."""
    assert isinstance(item, pytest.Function)
    return "device" in item.fixturenames and item.function.__annotations__.get("device") == "Device"


class FailureRecorder:
    """Record names and reasons of failures for the checklist."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the test that starts: the last recorded one is the one that ended the process."""
        self._report.note_current(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failed test."""
        if report.failed:
            lines = report.longreprtext.strip().splitlines()
            self._report.remark(f"{report.nodeid}: {report.when} failed: {lines[-1] if lines else ''}")


REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    """Open the report."""
    config.stash[REPORT] = Report(config.getoption("--figures"))
    config.pluginmanager.register(FailureRecorder(config.stash[REPORT]))


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Report:
    """Return the file to which a test writes its figures."""
    return request.config.stash[REPORT]


@pytest.fixture(scope="session")
def device_name(request: pytest.FixtureRequest) -> str:
    """``cuda``, or ``cpu`` for debugging."""
    name: str = request.config.getoption("--device")
    return name


@pytest.fixture(scope="session")
def device(device_name: str) -> Device:
    """Open the GPU through CuPy; missing kernels fail the tests, since the kernels are the subject."""
    if device_name == "cpu":
        from tests.cuda.emulated import EmulatedDevice

        return EmulatedDevice()
    from quintet.executor.backends.platforms.cuda import open_cuda_device, open_platform

    config = ExecutorConfig(device="cuda")
    open_platform(config)
    return open_cuda_device(config)


@pytest.fixture(autouse=True)
def checked_arguments(request: pytest.FixtureRequest) -> None:
    """Check kernel arguments in each test: a worker booted by an earlier test has disabled the check."""
    if "device" in request.fixturenames:
        request.getfixturevalue("device").checks_arguments = True


@pytest.fixture(autouse=True)
def exact_fp32() -> Iterator[None]:
    """Disable TF32 in torch's products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
