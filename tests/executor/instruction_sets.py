"""Runs a test file again, in a process for each other instruction set that this processor can compute with."""

from __future__ import annotations

import os
import subprocess
import sys

from quintet.executor.ops.host_library import instruction_set, instruction_sets, open_library

REPEATING = "QUINTET_TEST_REPEATING"


def isa() -> str:
    """The instruction set that this process computes with."""
    library = open_library()
    assert library is not None, "the host kernels are not built"
    return instruction_set(library)


def others() -> tuple[str, ...]:
    """What a test file is to be repeated with: nothing where there are no kernels, and nothing in a repetition."""
    library = open_library()
    if library is None or REPEATING in os.environ:
        return ()
    return tuple(name for name in instruction_sets(library) if name != isa())


def repeat(file: str, name: str) -> None:
    """Run the tests of ``file`` with the instruction set ``name``."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env={**os.environ, "QUINTET_ISA": name, REPEATING: name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
