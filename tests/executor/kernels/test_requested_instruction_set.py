"""A requested instruction set that is unavailable: another one is used, and the refusal has the reason."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.executor.kernels.instruction_sets import instruction_sets

from quintet.executor.backends.cpu.ops.host_library import open_library

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

PRINT_SELECTION = """
from quintet.executor.backends.cpu.ops.host_library import instruction_set, instruction_set_refusal, open_library
library = open_library()
print(instruction_set(library), instruction_set_refusal(library), sep="|")
"""


def selected(requested: str) -> tuple[str, str]:
    """Return the selected instruction set, and the reason if it is not the requested one."""
    run = subprocess.run(
        [sys.executable, "-c", PRINT_SELECTION],
        env={**os.environ, "QUINTET_ISA": requested},
        capture_output=True,
        text=True,
        check=True,
    )
    name, _, why = run.stdout.strip().partition("|")
    return name, why


def test_an_unknown_instruction_set_is_rejected_by_name() -> None:
    library = open_library()
    assert library is not None
    name, why = selected("amxx")
    assert name in instruction_sets(library)
    assert why.startswith("QUINTET_ISA=amxx: no such instruction set; there are ")
    assert all(f" {each}" in why for each in instruction_sets(library))


def test_an_available_instruction_set_is_used() -> None:
    assert selected("baseline") == ("baseline", "None")
