"""Followers of an executor as processes, from the parent's side: start them first, and exit when one of them exits.

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

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import msgspec

from quintet.executor.context import RankMemory
from quintet.executor.distributed.hosts.topology import ranks_of
from quintet.process.child import error_file
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG
from quintet.wire.ids import WorkerId

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
