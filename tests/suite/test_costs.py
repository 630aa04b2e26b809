"""Cost table at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUSY = """
import subprocess, sys, time
import pytest

@pytest.fixture(scope="module")
def child():
    yield
    code = "import time\\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_busy(child):
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass

@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_costs_include_child_processes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # only named plugins take time
    pytester.mkpydir("some").joinpath("test_busy.py").write_text(BUSY)
    plugins = ("-p", "xdist", "-p", "tests.suite.draw", "-p", "tests.suite.costs")
    result = pytester.runpytest_subprocess(*plugins, "-n", workers, "some")
    rows = {line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in result.outlines if line.strip()}
    num_tests, wall_s, processor_s = rows["some"]
    assert num_tests == "2"
    assert 0.7 <= float(processor_s) < 1.5
    assert float(wall_s) >= 0.7
    assert float(rows["total"][-1]) >= float(processor_s)
