"""The kernels' tests again, with each other instruction set that this processor can compute with.

In the fast suite a drawn tenth of them. One process for each: the instruction set is chosen once, when the library is loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.executor.instruction_sets import REPEATING, others
from tests.suite.draw import SEED

KERNELS = sorted(Path(__file__).parent.glob("test_*_kernels.py"))


@pytest.mark.parametrize("name", others())
def test_the_kernels_with_another_instruction_set(name: str, pytestconfig: pytest.Config) -> None:
    option = pytestconfig.option
    extent = ["--whole"] if option.whole else ["--share", "0.1"]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *(SEED, str(option.seed), *extent, *map(str, KERNELS)),
        ],
        env={**os.environ, "QUINTET_ISA": name, REPEATING: name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
