"""Traces between two signals: reproducible opcode counts, and the functions that any thread enters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.counting import sitecustomize
from bench.counting.control import ROLES
from bench.overhead.opcodes import LONG, SHORT, divide_counts

PROGRAM = f"""
import os, sys

def work(times):
    os.kill(os.getpid(), {int(sitecustomize.TOGGLE)})
    for _ in range(times):
        str()
    os.kill(os.getpid(), {int(sitecustomize.TOGGLE)})

work(int(sys.argv[1]))
"""


FUNCTIONS = f"""
import os, threading

def toggle():
    os.kill(os.getpid(), {int(sitecustomize.TOGGLE)})

def outside():
    pass

def inside():
    pass

def in_thread():
    begin.wait()
    inside_thread()

def inside_thread():
    pass

begin = threading.Event()
thread = threading.Thread(target=in_thread)
thread.start()
outside()
toggle()
inside()
begin.set()
thread.join()
toggle()
outside()
"""


def traced(program: str, folder: Path, *arguments: str, kind: str = "opcodes") -> str:
    """Run a program and return the content of its file."""
    found = os.pathsep.join([str(Path(sitecustomize.__file__).parent), *sys.path])
    variables = {"PYTHONPATH": found, sitecustomize.FOLDER: str(folder), sitecustomize.KIND: kind}
    subprocess.run([sys.executable, "-c", program, *arguments], env=os.environ | variables, check=True)
    (path,) = folder.iterdir()
    text = path.read_text()
    path.unlink()
    return text


def test_opcodes_between_two_signals_are_counted(tmp_path: Path) -> None:
    none, some, many = (int(traced(PROGRAM, tmp_path, str(times))) for times in (0, 100, 1100))
    assert many - some == 10 * (some - none) > 0


def test_entered_functions_of_all_threads_are_recorded(tmp_path: Path) -> None:
    table = traced(FUNCTIONS, tmp_path, kind="functions")
    lines = FUNCTIONS.splitlines()
    own = [row.split("\t") for row in table.splitlines() if row.startswith("<string>")]
    names = {lines[int(first) - 1] for _, first, _ in own}
    assert names == {"def toggle():", "def inside():", "def inside_thread():"}
    assert {int(last) - int(first) for _, first, last in own} == {1}


def test_request_and_further_step_are_separated() -> None:
    short = dict.fromkeys(ROLES, 5 * 700)
    long = dict.fromkeys(ROLES, 5 * (700 + 30 * (LONG - SHORT)))
    assert divide_counts(short, long, 5) == dict.fromkeys(ROLES, (700.0, 30.0))
