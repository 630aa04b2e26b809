"""An instruction set that is asked for and not to be had: computed with another one, and said so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quintet.executor.backends.cpu.ops.host_library import instruction_sets, open_library

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

TELL = """
from quintet.executor.backends.cpu.ops.host_library import instruction_set, instruction_set_refusal, open_library
library = open_library()
print(instruction_set(library), instruction_set_refusal(library), sep="|")
"""


def told(asked: str) -> tuple[str, str]:
    """The name of what is computed with, and why that is not what was asked for."""
    run = subprocess.run(
        [sys.executable, "-c", TELL],
        env={**os.environ, "QUINTET_ISA": asked},
        capture_output=True,
        text=True,
        check=True,
    )
    name, _, why = run.stdout.strip().partition("|")
    return name, why


def test_a_name_that_is_none_is_refused_by_name() -> None:
    library = open_library()
    assert library is not None
    name, why = told("amxx")
    assert name in instruction_sets(library)
    assert why.startswith("QUINTET_ISA=amxx: no such instruction set; there are ")
    assert all(f" {each}" in why for each in instruction_sets(library))


def test_what_can_be_had_is_taken_without_a_word() -> None:
    assert told("baseline") == ("baseline", "None")
