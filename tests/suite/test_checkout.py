"""A run with the package of another checkout ends before the first test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_package_of_another_checkout_is_rejected(tmp_path: Path) -> None:
    package = tmp_path / "src/quintet"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--collect-only",
            "tests/suite/test_order.py",
        ],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == pytest.ExitCode.USAGE_ERROR, run.stdout + run.stderr
    assert (
        f"the tests are those of {ROOT.resolve()}, but quintet is imported from {package.resolve()}"
        in run.stderr
    )
