"""Starts child processes by module name. Must be called from the main thread: children die with the thread that made them."""

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
"""Environment variable that tells a frontend which descriptor is the listening socket."""


class ChildProcess(Protocol):
    """What the supervisor asks of a child, however it was made: a `subprocess.Popen`, or one that was forked off."""

    @property
    def pid(self) -> int:
        """Process id."""

    def poll(self) -> int | None:
        """Return the exit status if it ended."""

    def wait(self) -> int:
        """Return the exit status once it ended."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless it ended."""

    def kill(self) -> None:
        """End it at once."""


class WaitingProcess(ChildProcess, Protocol):
    """A child that waits at its standard input for a slot."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The way to its standard input."""


def assign_slot(process: WaitingProcess, worker: WorkerId) -> bool:
    """Make a child that waits ``worker``. Return False where it has ended instead."""
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
    """Knows how a child of each role is started."""

    def __init__(self, run_dir: Path, modules: Mapping[Role, str], listen_fd: int | None) -> None:
        self._run_dir = run_dir
        self._modules = modules
        self._listen_fd = listen_fd

    def spawn(self, worker: WorkerId) -> subprocess.Popen[bytes]:
        """Start ``worker``.

        Each child leads a process group of its own, so that a terminal's Ctrl-C reaches only the supervisor even
        before the child has had time to ignore it.
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

    def spawn_spare(self, role: Role) -> subprocess.Popen[bytes]:
        """Start a process of this role that boots and then waits for a slot: a line ``INDEX EPOCH`` at its input."""
        return subprocess.Popen(self._command(role), stdin=subprocess.PIPE, process_group=0)

    def _command(self, role: Role) -> list[str]:
        return [
            sys.executable, "-P", "-m", self._modules[role],
            "--run-dir", str(self._run_dir),
            "--parent", str(os.getpid()),
        ]  # fmt: skip
