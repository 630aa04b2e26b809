"""Starts child processes by module name. Must be called from the main thread: children die with the thread that made them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

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
        seat = ["--index", str(worker.index), "--epoch", str(worker.epoch)]
        return subprocess.Popen(
            [*self._command(worker.role), *seat],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=environment,
            process_group=0,
        )

    def spawn_spare(self, role: Role) -> subprocess.Popen[bytes]:
        """Start a process of this role that boots and then waits for a seat: a line ``INDEX EPOCH`` at its input."""
        return subprocess.Popen(self._command(role), stdin=subprocess.PIPE, process_group=0)

    def _command(self, role: Role) -> list[str]:
        return [
            sys.executable, "-P", "-m", self._modules[role],
            "--run-dir", str(self._run_dir),
            "--parent", str(os.getpid()),
        ]  # fmt: skip
