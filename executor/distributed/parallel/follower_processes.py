"""Child processes of an executor: the parent starts its followers first, and exits when one of them exits.

For other processes an executor is a single process: the leader has the slot, the plans and the results. All ranks
exit together:

    a follower exits     the leader exits at once, even during a step; the supervisor restarts the executor
    the leader exits     the kernel kills the followers (PR_SET_PDEATHSIG)
    a rank hangs         steps stop, the leader's heartbeats show no progress, and the supervisor aborts it

So no rank needs liveness checks while it waits for another. With several hosts
(`quintet.executor.distributed.hosts`), the leader starts the first host's followers and the hub. On each other host a
member process starts the local followers and exits with its connection. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import setproctitle

from quintet.executor.context import RankMemory
from quintet.executor.distributed.hosts.topology import ranks_of
from quintet.process.child import die_with_parent, error_file
from quintet.process.log import configure_logging
from quintet.process.trace import WRITE_NOW
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError
from quintet.wire.ids import Role, WorkerId

RANK, HUB = "quintet.executor.distributed.parallel.follower", "quintet.executor.distributed.hosts.hub"

WRITE_S = 1.5
"""Time for a traced follower to write its file at exit. The leader writes its own afterwards, within its exit timeout."""

log = logging.getLogger("quintet")


class FollowerProcesses:
    """A host's followers of one executor. Create it in the main thread: children are killed with the thread that made them."""

    def __init__(self, me: WorkerId, config: EngineConfig, host: int = 0) -> None:
        self._config = config
        self._me = me
        self._is_closing = False
        size, stages = config.executor.tensor_parallel_size, config.executor.pipeline_parallel_size
        self.memory = RankMemory(
            tuple(os.memfd_create("quintet-ranks") for _ in range(stages if size > 1 else 0)),
            tuple(os.memfd_create("quintet-link") for _ in range(stages if stages > 1 else 0)),
            tuple(os.memfd_create("quintet-gather") for _ in range(bool(config.cache.remote_tiers))),
        )
        self._descriptors = (*self.memory.stages, *self.memory.links, *self.memory.gather)
        ranks = (rank for rank in ranks_of(config.executor, host) if rank != 0)
        self._processes = {f"rank {rank}": self._start(RANK, rank) for rank in ranks}
        if host == 0 and config.executor.hosts is not None:
            self._processes["the hub"] = self._start(HUB, 0)
        for name, process in self._processes.items():
            threading.Thread(target=self._watch, args=(name, process), name=name, daemon=True).start()

    def _start(self, module: str, rank: int) -> subprocess.Popen[bytes]:
        slot = ["--index", str(self._me.index), "--epoch", str(self._me.epoch), "--rank", str(rank)]
        memory = ["--memory", msgspec.json.encode(self.memory).decode()]
        parent = ["--parent", str(os.getpid())]
        with (
            tempfile.TemporaryFile() as written
        ):  # not in the run folder, which a replayed recording does not have
            written.write(msgspec.json.encode(self._config))
            written.seek(0)
            return subprocess.Popen(
                [sys.executable, "-P", "-m", module, *slot, *memory, *parent],
                stdin=written,
                pass_fds=self._descriptors,
                process_group=0,
            )

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._is_closing:
            return
        try:
            reason = f"{name} {ending(status)}; all ranks exit"
            log.critical("%s", reason)
            file = error_file(self._config.run_dir, self._me)
            with contextlib.suppress(OSError):
                if not file.exists():  # else the rank has written the cause
                    file.write_text(reason)
        finally:  # even if the main thread is blocked
            os._exit(EXIT_CONFIG if status == EXIT_CONFIG else 1)

    def close(self) -> None:
        """Kill the processes; traced ones write their trace first."""
        self._is_closing = True
        if self._config.trace is not None:
            self._write_traces()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _write_traces(self) -> None:
        for process in self._processes.values():
            process.terminate()
        until = time.monotonic() + WRITE_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))


def ending(status: int) -> str:
    """Describe the end of a process, from the status of `subprocess.Popen.wait`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal: most have no name
        return f"was killed by signal {-status}"


@dataclass(frozen=True, slots=True)
class ChildIdentity:
    """Identity of a child process."""

    me: WorkerId
    rank: int
    """Rank in the executor; 0 for a process that is no rank."""
    memory: RankMemory = field(default_factory=RankMemory)


Work = Callable[[ChildIdentity, EngineConfig], None]


def run_child(kind: str, work: Work) -> None:
    """Run ``work`` until the parent exits or ``work`` fails. kind: process title. Reads the configuration from stdin."""
    parser = argparse.ArgumentParser(description="Run a child process of an executor; started by its leader.")
    parser.add_argument("--index", type=int, required=True, help="slot of the executor")
    parser.add_argument("--epoch", type=int, required=True, help="number of starts of that slot")
    parser.add_argument("--rank", type=int, required=True, help="rank, or 0 for the hub")
    parser.add_argument(
        "--memory", required=True, help="descriptors of the memory that the ranks share, as JSON"
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    arguments = parser.parse_args()
    begin_child(arguments.parent)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    me = WorkerId(Role.EXECUTOR, arguments.index, arguments.epoch)
    number = str(arguments.rank or "")
    setproctitle.setproctitle("-".join(filter(None, (f"quintet-{me.role}-{me.index}", kind, number))))
    configure_logging(f"{me}.{kind}{number}", config.log_level)
    try:
        memory = msgspec.json.decode(arguments.memory, type=RankMemory)
        work(ChildIdentity(me, arguments.rank, memory), config)
    except Exception as error:  # noqa: BLE001 - the other ranks exit with this process
        end_child(error, error_file(config.run_dir, me), f"{kind} {number}".strip())


def begin_child(parent: int) -> None:
    """Make this process exit with its parent, given by id."""
    die_with_parent()
    if os.getppid() != parent:
        raise SystemExit("the parent process has exited")
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the supervisor decides
    signal.signal(WRITE_NOW, signal.SIG_IGN)  # sent by process name; most child processes record no trace


def end_child(error: Exception, error_path: Path, name: str, *, at_once: bool = False) -> NoReturn:
    """Exit after an error: write it to a file for the supervisor, and log it.

    name: of this process, a prefix of the text. at_once: exit without waiting for other threads.
    """
    is_config, is_expected = isinstance(error, ConfigError), isinstance(error, ExpectedEnd)
    reason = str(error) if is_config or is_expected else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        error_path.write_text(f"{name}: {reason}")
    log = logging.getLogger("quintet")
    if is_expected:
        log.error("%s", reason)
    elif not is_config:
        log.critical("exits after %s", type(error).__name__, exc_info=error)
    status = EXIT_CONFIG if is_config else 1
    if at_once:
        os._exit(status)
    sys.exit(status)


class ExpectedEnd(Exception):
    """An exit with a cause outside this process; the message names it."""
