"""Diagnose the first failure of a stage: print a kernel's core dump, then run the failing test alone, and under memcheck.

    python -m bench.gpu.diagnosis LOGS

LOGS: the stage's folder of logs. Each part has a time limit, and is skipped if its tool is not installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench.gpu.machine import ROOT, environment
from bench.gpu.results_file import Outcome
from bench.gpu.rows import PYTEST
from bench.gpu.summary import entries_of

BLOCKING_S, MEMCHECK_S, DEBUGGER_S = 20, 40, 10
_FAILED = re.compile(r"^(tests/\S+?::.+?): (?:setup|call|teardown) failed")


def first_failing_test(logs: Path) -> str | None:
    """Return the pytest id of the first failed test, or of the test during which a row's process ended."""
    entries = entries_of(logs)
    for entry in entries.values():
        for remark in entry.remarks:
            if found := _FAILED.match(remark):
                return found[1]
    for name, entry in entries.items():
        if entry.outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
            for path in sorted(logs.glob(f"rows-*/{name}.current")):
                return path.read_text()
    return None


def pytest_arguments(test: str) -> list[str]:
    """Return the arguments that run one GPU test; kernel tests are collected through ``tests/gpu/test_kernels.py``."""
    path = "tests/gpu/test_kernels.py" if test.startswith("tests/cuda/") else test.partition("::")[0]
    return [*PYTEST, path, "--only-id", test]


def without_core_dumps() -> dict[str, str]:
    """Return the environment without core dumps, since memcheck uses the same debugger interface."""
    return {name: value for name, value in environment().items() if "COREDUMP" not in name}


def run_part(title: str, command: list[str], limit_s: float, **variables: str) -> None:
    """Run a command with its output on stdout; print the command and its exit status."""
    print(f"== {title}: {' '.join(command)}", flush=True)
    if shutil.which(command[0]) is None:
        print(f"{command[0]} is not installed", flush=True)
        return
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env=without_core_dumps() | variables,
            timeout=limit_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        print(f"== {title}: exit status {ran.returncode}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"== {title}: killed after {limit_s:g} s", flush=True)


def main() -> int:
    """Run all parts."""
    logs = Path(sys.argv[1])
    for core in sorted(logs.glob("*.cudacore"))[:1]:
        script = [
            "-ex",
            f"target cudacore {core}",
            "-ex",
            "info cuda kernels",
            "-ex",
            "bt",
            "-ex",
            "info registers pc",
        ]
        run_part("core dump", ["cuda-gdb", "--batch", *script], DEBUGGER_S)
    test = first_failing_test(logs)
    if test is None:
        print("no failed test is reported; running the smoke test instead", flush=True)
    command = [sys.executable, *(("-m", "bench.gpu.smoke") if test is None else pytest_arguments(test))]
    run_part("alone, with blocking launches", command, BLOCKING_S, CUDA_LAUNCH_BLOCKING="1")
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--print-limit", "5"]
    run_part("memcheck", [*sanitizer, *command], MEMCHECK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
