"""Start child processes by module name. Call from the main thread: children die with the thread that started them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
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

    def poll(self) -> int | None:
        """Return the exit status; None while the child runs."""

    def wait(self) -> int:
        """Wait for the exit and return the exit status."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless the child has exited."""

    def kill(self) -> None:
        """Send SIGKILL."""


class WaitingProcess(ChildProcess, Protocol):
    """A child that waits at its standard input for a slot."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Pipe to the child's standard input."""


def assign_slot(process: WaitingProcess, worker: WorkerId) -> bool:
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
    """Starts the child processes of each role."""

    def __init__(self, run_dir: Path, modules: Mapping[Role, str], listen_fd: int | None) -> None:
        self._run_dir = run_dir
        self._modules = modules
        self._listen_fd = listen_fd

    def spawn(self, worker: WorkerId) -> subprocess.Popen[bytes]:
        """Start ``worker``.

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
        """Start a standby process: it boots, then waits for its slot, a line ``INDEX EPOCH`` on its standard input."""
        return subprocess.Popen(self._command(role), stdin=subprocess.PIPE, process_group=0)

    def _command(self, role: Role) -> list[str]:
        return [
            sys.executable, "-P", "-m", self._modules[role],
            "--run-dir", str(self._run_dir),
            "--parent", str(os.getpid()),
        ]  # fmt: skip
