"""Weight unpacking under the address and undefined-behaviour sanitizers, for a bounded time.

The program in `unpacking/` packs noise, extremes of floats and invalid codes into weights of every format and size, from arrays
without padding. It is compiled with the unpacking kernels, for every instruction set.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest
from tests.executor.kernels.compiled_checks import INCLUDES, NATIVE, ROOT, compiled, kernel_sources, run
from tests.executor.kernels.instruction_sets import all_of_them

from quintet.executor.backends.cpu.ops.host_linear import WeightFormat

SANITIZED = (
    *("-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer", "-Wall", *INCLUDES),
    *(
        "-fsanitize=address,undefined,float-cast-overflow",
        "-fno-sanitize-recover=all",
        "-Wno-frame-larger-than",
    ),
)
NEEDED = ("weight", "weight_outliers", "pool", "cores", "dispatch", "linear_pack", "matrix_check")
"""Sources that fill and read a packed weight."""
SECONDS = "4"


@pytest.fixture(scope="module")
def fuzz() -> Path:
    """The compiled program with those sources."""
    if shutil.which(NATIVE[0]) is None:
        pytest.skip(f"needs the compiler {NATIVE[0]}")
    sources = [
        (path, (*flags, *SANITIZED))
        for path, flags in kernel_sources(platform.machine())
        if path.stem in NEEDED
    ]
    counted = f"-DQT_NUM_FORMATS={len(WeightFormat)}"  # the program does not compile if it lacks a format
    sources.append((ROOT / "tests/executor/kernels/unpacking/fuzz.cpp", (*SANITIZED, counted)))
    return compiled(NATIVE, "fuzz", sources, *SANITIZED)


@pytest.mark.whole  # compiles some kernels again
@pytest.mark.parametrize("name", all_of_them())
def test_unpacking_of_any_file_passes_the_sanitizers(fuzz: Path, name: str) -> None:
    packed, fewest = map(int, run(str(fuzz), "1", SECONDS, env={**os.environ, "QUINTET_ISA": name}).split())
    assert packed > 100 and fewest > 0
