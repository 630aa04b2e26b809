"""Kernel tests repeated with each other instruction set of this processor.

The fast suite runs a tenth of them, with one set. Each set has its own process, as it is selected when the library is loaded.
With a matrix unit, tests of whole models' bits are repeated too, as it sums in another order.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.executor.kernels.instruction_sets import MATRIX_UNITS, REPEATING, others
from tests.suite.draw import SEED

KERNELS = sorted(Path(__file__).parent.glob("test_*_kernels.py"))


SAME_BITS = Path(__file__).parents[2] / "models/test_same_bits.py"


def repeat(name: str, config: pytest.Config, share: str, *files: Path) -> None:
    option = config.option
    extent = ["--whole"] if option.whole else ["--share", share]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *(SEED, str(option.seed), *extent, *map(str, files)),
        ],
        env={**os.environ, "QUINTET_ISA": name, REPEATING: name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", others())
def test_the_kernels_with_another_instruction_set(name: str, pytestconfig: pytest.Config) -> None:
    repeat(name, pytestconfig, "0.05", *KERNELS)


@pytest.mark.parametrize("name", [name for name in others() if name in MATRIX_UNITS])
def test_the_bits_of_models_with_a_matrix_unit(name: str, pytestconfig: pytest.Config) -> None:
    repeat(name, pytestconfig, "1", SAME_BITS)
