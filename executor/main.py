"""Start of the executor process: environment, imports, the worker with its ranks, and then the loop.

`quintet.executor.loop` executes plans.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading

from quintet.executor.backends import registry
from quintet.executor.backends.platforms.shares import take_share
from quintet.executor.backends.registry import BACKENDS, import_backend
from quintet.executor.checkpoints.weights.read_ahead import read_ahead, reserve_ahead
from quintet.executor.context import RankMemory
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.executor.interface import StepWorker
from quintet.executor.kv_transfer.connector import with_engine_paths, without_failed_disk
from quintet.executor.loop import Executor, Message
from quintet.executor.model_config.share import share_of
from quintet.process.child import child_main
from quintet.process.runtime import Process
from quintet.process.spans import TraceSpan
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Defaults for libraries that a worker loads; values set by the user take precedence.

OpenMP threads sleep between parallel regions and leave their cores to the other processes. Torch requests huge pages
for large tensors.
"""


def begin_imports() -> None:
    """Start a thread that imports the CPU back end while the configuration is resolved.

    `make_worker` waits for the thread through Python's import lock. It repeats an import that failed, and raises its
    error.
    """
    _set_environment()
    gc.disable()  # see `make_worker`
    module, _, _ = BACKENDS["cpu"].worker.partition(":")
    threading.Thread(target=_import_quietly, args=(module,), name="imports", daemon=True).start()


def _import_quietly(module: str) -> None:
    with contextlib.suppress(Exception):
        importlib.import_module(module)


def _set_environment() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def make_worker(
    config: EngineConfig, span: TraceSpan, followers: FollowerProcesses | None = None
) -> StepWorker:
    """Import and build the configured worker; with ``followers``, a worker that spans several ranks."""
    _set_environment()
    ahead = None
    if config.executor.kind == "torch" and config.executor.load_format == "auto":
        read_ahead(config, share_of(config.executor, 0).label)
        ahead = reserve_ahead(config)
    gc.disable()  # importing torch makes a million permanent objects; collecting among them takes 1/7 of the import time
    import_backend(config)
    gc.enable()
    memory = RankMemory() if followers is None else followers.memory
    return registry.make_worker(config, span, memory, ahead)


def serve(process: Process[Message]) -> None:
    """Start the worker, then execute plans until the process is stopped."""
    process.start_heartbeat_thread()
    followers = None
    try:
        if process.config.executor.num_ranks > 1:
            _set_environment()  # inherited by the followers
            followers = FollowerProcesses(process.me, process.config)  # first: all ranks load in parallel
        config = with_engine_paths(process.me.index, take_share(process.me.index, process.config))
        if process.me.epoch > 1:
            config = without_failed_disk(config)
        worker = make_worker(config, process.span, followers)
        executor = Executor(process, worker)
        process.account = executor.account
        process.ready(**worker.facts)
        with contextlib.closing(executor):
            while True:
                executor.run_once()
    finally:
        if followers is not None:
            followers.close()
        process.close()


def run(me: WorkerId, config: EngineConfig) -> None:
    """Run the executor process."""
    serve(Process(me, config, Message))


if __name__ == "__main__":
    child_main(Role.EXECUTOR, run, begin=begin_imports)
