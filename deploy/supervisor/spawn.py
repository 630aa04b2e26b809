"""Start child processes by module name. Call from the main thread: children die with the thread that started them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from quintet.wire.ids import Role, WorkerId

MODULES: Mapping[Role, str] = {
    Role.FRONTEND: "quintet.frontend.main",
    Role.TOKENIZER: "quintet.tokenizer_proc.main",
    Role.CORE: "quintet.core.main",
    Role.EXECUTOR: "quintet.executor.main",
    Role.DETOKENIZER: "quintet.detokenizer_proc.main",
}

LISTEN_FD = "QUINTET_LISTEN_FD"
"""Environment variable with the descriptor of a frontend's listening socket."""


class ChildProcess(Protocol):
    """Interface of a child process: `subprocess.Popen`, or a forked child."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Pipe to the standard input of a child that waits for a slot."""

    def poll(self) -> int | None:
        """Return the exit status; None while the child runs."""

    def wait(self) -> int:
        """Wait for the exit and return the exit status."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless the child has exited."""

    def kill(self) -> None: ...


def end_processes(processes: Collection[ChildProcess]) -> None:
    """Kill the processes, and wait for them."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def assign_slot(process: ChildProcess, worker: WorkerId) -> bool:
    """Assign the slot of ``worker`` to a waiting child. Return False if the child has exited."""
    assert process.stdin is not None
    if process.poll() is not None:
        process.stdin.close()
        return False
    try:
        process.stdin.write(f"{worker.index} {worker.epoch}\n".encode())
        process.stdin.close()
    except BrokenPipeError:
        process.wait()
        return False
    return True


class Spawner:
    def __init__(self, run_dir: Path, modules: Mapping[Role, str], listen_fd: int | None) -> None:
        self._run_dir = run_dir
        self._modules = modules
        self._listen_fd = listen_fd

    def spawn(self, worker: WorkerId) -> subprocess.Popen[bytes]:
        """Start ``worker``. Raises `OSError` if the system refuses.

        Each child leads a new process group. Ctrl-C in a terminal then reaches only the supervisor, even before the
        child ignores the signal.
        """
        environment, descriptors = dict(os.environ), []
        if worker.role is Role.FRONTEND and self._listen_fd is not None:
            environment[LISTEN_FD] = str(self._listen_fd)
            descriptors.append(self._listen_fd)
        slot = ["--index", str(worker.index), "--epoch", str(worker.epoch)]
        return subprocess.Popen(
            [*self._command(worker.role), *slot],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=environment,
            process_group=0,
        )

    def spawn_standby(self, role: Role) -> subprocess.Popen[bytes]:
        """Start a standby process: it boots, then waits for its slot, a line ``INDEX EPOCH`` on its standard input.

        Raises `OSError` if the system refuses.
        """
        return subprocess.Popen(self._command(role), stdin=subprocess.PIPE, process_group=0)

    def _command(self, role: Role) -> list[str]:
        return [
            sys.executable, "-P", "-m", self._modules[role],
            "--run-dir", str(self._run_dir),
            "--parent", str(os.getpid()),
        ]  # fmt: skip


STANDBY_ROLES = (Role.TOKENIZER, Role.DETOKENIZER)
PAUSE_S = 1.5
"""Delay of the next standby process after one was used, so that the replacement gets the processor first."""
FIRST_PAUSE_S = 3.0
"""Delay after the server is ready, so that first requests get the processor first."""
REFUSED_PAUSE_S = 30.0
"""Delay of the next standby process after the system refused to start one."""
MAX_LOSSES = 3
"""Unused standby processes of a role that may die before no more are started."""


class StandbyProcesses:
    """One standby process for each of ``roles``: booted without a slot, it replaces a dead process of its role at once.

    Booting a tokenizer or detokenizer reads a large vocabulary, which takes seconds on a loaded machine. A standby process
    waits on its standard input for its slot (`quintet.process.runtime`).
    """

    def __init__(self, spawner: Spawner, roles: Sequence[Role]) -> None:
        self._spawner = spawner
        self._waiting: dict[Role, subprocess.Popen[bytes]] = {}
        self._roles = roles
        self._started = False
        self._due: dict[Role, float] = {}
        """Start time of the next standby process, for each role without one."""
        self._losses = dict.fromkeys(roles, 0)
        self._log = logging.getLogger("quintet")

    def replenish(self, now: float) -> None:
        """Start missing standby processes that are due, and count dead ones."""
        if not self._started:
            self._started = True
            self._due = dict.fromkeys(self._roles, now + FIRST_PAUSE_S)
        for role, process in list(self._waiting.items()):
            if process.poll() is not None:
                del self._waiting[role]
                self._losses[role] += 1
                self._log.warning("standby %s exited with status %s", role, process.returncode)
                if self._losses[role] < MAX_LOSSES:
                    self._due[role] = now + PAUSE_S
        for role, due in list(self._due.items()):
            if now >= due:
                try:
                    self._waiting[role] = self._spawner.spawn_standby(role)
                except OSError as error:
                    self._due[role] = now + REFUSED_PAUSE_S
                    self._log.warning("standby %s could not be started: %s", role, error)
                else:
                    del self._due[role]

    def take(self, worker: WorkerId, now: float) -> subprocess.Popen[bytes] | None:
        """Assign ``worker``'s slot to the standby process of its role and return it; None without one."""
        process = self._waiting.get(worker.role)
        if process is None or process.poll() is not None:
            return None
        del self._waiting[worker.role]
        self._due[worker.role] = now + PAUSE_S
        return process if assign_slot(process, worker) else None

    def end(self) -> None:
        """Kill the standby processes, and start no more."""
        end_processes(self._waiting.values())
        self._waiting.clear()
        self._due.clear()
        self._started = True
