"""Run a command in a new session with a time limit; kill all processes of the session at the end.

Linux only: it finds the processes of a session in ``/proc``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICK_S = 0.2
STACK_DUMP_S = 3.0
"""Time for a hanging process to dump its stacks (Python's faulthandler, on SIGABRT) before SIGKILL."""
EXIT_TIMEOUT_S = 10.0
"""Time for killed processes to exit; the kernel frees their GPU memory first."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """Exit status and duration of a command."""

    status: int | None
    """Exit status, negative for a signal; None after the time limit."""
    seconds: float


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    limit_s: float,
    on_tick: Callable[[], None] = lambda: None,
) -> ProcessResult:
    """Run ``command`` with its output in the file ``log``; call ``on_tick`` several times a second and at the end."""
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        remaining: set[int] = set()
        try:
            while status is None and time.monotonic() - begin_s < limit_s:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(TICK_S)
                on_tick()
            if status is None:
                remaining = descendants(
                    process.pid
                )  # processes in other sessions are found by their parent, which ends now
                process.send_signal(signal.SIGABRT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STACK_DUMP_S)
        finally:
            end_session(process)
            for pid in remaining:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    on_tick()
    return ProcessResult(status, time.monotonic() - begin_s)


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill all processes of the session of ``leader``, and wait for their exits."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    if leader.poll() is None:
        os.killpg(leader.pid, signal.SIGKILL)
    while True:
        remaining = members(leader.pid)
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(TICK_S if remaining else 0)
        if not remaining:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"processes {remaining} did not exit within {EXIT_TIMEOUT_S:g} s after SIGKILL"
            )
        time.sleep(TICK_S / 10)


def descendants(pid: int) -> set[int]:
    """Return the process ids of all descendants of a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def members(session: int) -> list[int]:
    """Return the process ids of a session, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # the process may have exited
                state = (entry / "stat").read_text().rpartition(")")[2].split()
                # state, parent, process group, session
                if state[3] == str(session) and state[0] not in "ZX":
                    found.append(int(entry.name))
    return found
