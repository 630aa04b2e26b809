"""The other ranks' processes on a host, as who starts them sees them: before anything else, and it ends when one of them ends.

For all others an executor is one process: rank 0 has the slot, the plans and the results. A group of ranks lives and dies as one.

    another rank dies    rank 0 ends at once, in the middle of a step or not; the supervisor fills the slot again
    rank 0 dies          the kernel kills the others (PR_SET_PDEATHSIG)
    a rank hangs         nothing is completed any more, which rank 0's heartbeats tell; the supervisor aborts it

So nobody who waits for a rank has to look whether it lives. Where ranks are on several hosts
(`quintet.executor.distributed.hosts`) rank 0 starts those of the first, and the process that the other hosts talk
with; on each other host a process that has its place starts those there, and ends with the connection. Imports no
torch.
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
from itertools import chain

import msgspec

from quintet.executor.distributed.hosts.topology import ranks_of
from quintet.process.runtime import error_file
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG
from quintet.wire.ids import WorkerId

RANK, HUB = "quintet.executor.distributed.parallel.follower", "quintet.executor.distributed.hosts.hub"

WRITE_S = 1.5
"""What a process that is traced has at its end for writing its file. Rank 0 writes its own behind that, while it may live."""

log = logging.getLogger("quintet")


class FollowerProcesses:
    """A host's ranks of one executor but rank 0. Made in the main thread: children die with the thread that made them."""

    def __init__(self, me: WorkerId, config: EngineConfig, host: int = 0) -> None:
        self._config = config
        self._me = me
        self._is_closing = False
        size, stages = config.executor.tensor_parallel_size, config.executor.pipeline_parallel_size
        self.groups = tuple(os.memfd_create("quintet-ranks") for _ in range(stages if size > 1 else 0))
        """Descriptors of the memory that ranks of a stage share, of each stage; see
        `quintet.executor.distributed.parallel.ranks`.
        """
        self.links = tuple(os.memfd_create("quintet-link") for _ in range(stages if stages > 1 else 0))
        """Of that between each stage and the next; see `quintet.executor.distributed.parallel.links`."""
        self.crossings = tuple(os.memfd_create("quintet-crossing") for _ in range(config.cache.leaves))
        """Of that in which parts of blocks come together that go elsewhere; see
        `quintet.executor.distributed.parallel.kv_gather`.
        """
        self._memory = {"groups": self.groups, "links": self.links, "crossings": self.crossings}
        ranks = (rank for rank in ranks_of(config.executor, host) if rank != 0)
        self._processes = {f"rank {rank}": self._start(RANK, rank) for rank in ranks}
        if host == 0 and config.executor.hosts is not None:
            self._processes["the hub"] = self._start(HUB, 0)
        for name, process in self._processes.items():
            threading.Thread(target=self._watch, args=(name, process), name=name, daemon=True).start()

    def _start(self, module: str, rank: int) -> subprocess.Popen[bytes]:
        slot = ["--index", str(self._me.index), "--epoch", str(self._me.epoch), "--rank", str(rank)]
        memory = [f"--{name}={','.join(map(str, each))}" for name, each in self._memory.items()]
        parent = ["--parent", str(os.getpid())]
        with (
            tempfile.TemporaryFile() as written
        ):  # not the run folder's, which a recording that is played has no more
            written.write(msgspec.json.encode(self._config))
            written.seek(0)
            return subprocess.Popen(
                [sys.executable, "-P", "-m", module, *slot, *memory, *parent],
                stdin=written,
                pass_fds=[*chain(*self._memory.values())],
                process_group=0,
            )

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._is_closing:
            return
        try:
            words = f"{name} {ending(status)}; all ranks end with it"
            log.critical("%s", words)
            file = error_file(self._config.run_dir, self._me)
            with contextlib.suppress(OSError):
                if not file.exists():  # else the rank has said why itself
                    file.write_text(words)
        finally:  # whatever the main thread waits for
            os._exit(EXIT_CONFIG if status == EXIT_CONFIG else 1)

    def close(self) -> None:
        """End them; first have those that are traced write what they did."""
        self._is_closing = True
        if self._config.trace is not None:
            self._have_written()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        for descriptor in chain(*self._memory.values()):
            os.close(descriptor)

    def _have_written(self) -> None:
        for process in self._processes.values():
            process.terminate()
        until = time.monotonic() + WRITE_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))


def ending(status: int) -> str:
    """Say how a process ended, by what `subprocess.Popen.wait` returned."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal: most have no name
        return f"was killed by signal {-status}"
