"""The table at the end of a run."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize("parallel", [[], ["-n", "2"]])
def test_counts_what_tests_and_their_processes_compute(tmp_path: Path, parallel: list[str]) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some/test_busy.py").write_text(BUSY)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.suite.draw",
            "-p",
            "tests.suite.costs",
            *parallel,
            "some",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {
        line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in done.stdout.splitlines() if line.strip()
    }
    num_tests, wall_s, processor_s = rows["some"]
    assert num_tests == "2"
    assert 0.7 <= float(processor_s) < 1.5
    assert float(wall_s) >= 0.7
    assert float(rows["altogether"][-1]) >= float(processor_s)
