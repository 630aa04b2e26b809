"""Opcode counts between two signals are reproducible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.overhead.counting import sitecustomize
from bench.overhead.opcodes import LONG, ROLES, SHORT, parts

PROGRAM = f"""
import os, sys

def work(times):
    os.kill(os.getpid(), {int(sitecustomize.TOGGLE)})
    for _ in range(times):
        str()
    os.kill(os.getpid(), {int(sitecustomize.TOGGLE)})

work(int(sys.argv[1]))
"""


def counted(times: int, folder: Path) -> int:
    found = os.pathsep.join([str(Path(sitecustomize.__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": found, sitecustomize.FOLDER: str(folder)}
    subprocess.run([sys.executable, "-c", PROGRAM, str(times)], env=environment, check=True)
    (count_file,) = folder.iterdir()
    number = int(count_file.read_text())
    count_file.unlink()
    return number


def test_opcodes_between_two_signals_are_counted(tmp_path: Path) -> None:
    none, some, many = (counted(times, tmp_path) for times in (0, 100, 1100))
    assert many - some == 10 * (some - none) > 0


def test_request_and_further_step_are_separated() -> None:
    short = dict.fromkeys(ROLES, 5 * 700)
    long = dict.fromkeys(ROLES, 5 * (700 + 30 * (LONG - SHORT)))
    assert parts(short, long, 5) == dict.fromkeys(ROLES, (700.0, 30.0))
