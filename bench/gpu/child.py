"""Run a command in its own session with a time limit; kill all its processes at the end.

Knows not what the command does. Linux only: it reads ``/proc`` to find what belongs to a session.
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
LAST_WORDS_S = 3.0
"""Time for a hanging process to write its stacks (Python's faulthandler, on SIGABRT) before it is killed."""
GONE_S = 10.0
"""Time for killed processes to vanish: the kernel gives back a GPU's memory first."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome of a command."""

    status: int | None
    """Exit status, negative for a signal; None when it was killed because its time was over."""
    seconds: float


def run(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    limit_s: float,
    on_tick: Callable[[], None] = lambda: None,
) -> Ended:
    """Run ``command`` with its output in the file ``log``; call ``on_tick`` several times a second and at the end."""
    begun = time.monotonic()
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
        left: set[int] = set()
        try:
            while status is None and time.monotonic() - begun < limit_s:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(TICK_S)
                on_tick()
            if status is None:
                left = descendants(process.pid)  # those in sessions of their own lose their parent now
                process.send_signal(signal.SIGABRT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_S)
        finally:
            end_session(process)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    on_tick()
    return Ended(status, time.monotonic() - begun)


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill every process of the session that ``leader`` began, and wait until all are gone."""
    deadline = time.monotonic() + GONE_S
    if leader.poll() is None:
        os.killpg(leader.pid, signal.SIGKILL)
    while True:
        left = members(leader.pid)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(TICK_S if left else 0)
        if not left:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} were killed and are still there after {GONE_S:g} s")
        time.sleep(TICK_S / 10)


def descendants(pid: int) -> set[int]:
    """Return all processes that a process started, and those that they started."""
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
    """Return the processes of a session, those left out that have ended and wait to be read."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it may be gone by now
                state = (entry / "stat").read_text().rpartition(")")[2].split()
                # state, parent, process group, session
                if state[3] == str(session) and state[0] not in "ZX":
                    found.append(int(entry.name))
    return found
