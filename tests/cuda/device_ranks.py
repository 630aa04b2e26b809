"""Tensor parallelism over emulated devices: ranks are threads of the test and communicate as server processes do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import msgspec
import numpy as np
from tests.cuda.rank_devices import devices_of
from tests.cuda.test_worker import draft_on, model_on

from quintet.executor.backends.cuda.boot import make_device_worker
from quintet.executor.backends.cuda.ops.tables import HEADER_WORDS, PackedPlan
from quintet.executor.backends.cuda.ranks.communicator import open_device_ranks
from quintet.executor.backends.cuda.ranks.follower import follow
from quintet.executor.backends.cuda.ranks.rank_broadcast import RankBroadcaster
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.executor.context import WorkerContext
from quintet.executor.model_config.share import OUTPUT
from quintet.wire.config import EngineConfig


@contextmanager
def leading_worker(config: EngineConfig, *, captured: bool = True) -> Iterator[DeviceWorker]:
    """Yield rank 0's worker, with all graphs captured or none; end all ranks on exit. config: resolved for the number
    of ranks.
    """
    executor = msgspec.structs.replace(config.executor, enforce_eager=not captured)
    config = msgspec.structs.replace(config, executor=executor)
    descriptor, devices = os.memfd_create("ranks"), devices_of(executor.tensor_parallel_size)
    is_over = threading.Event()

    def context_of(rank: int) -> WorkerContext:
        context = WorkerContext(config)
        context.join(open_device_ranks(config, descriptor, rank))
        return context

    def run_rank(rank: int) -> None:
        context = context_of(rank)
        for _ in follow(devices[rank], model_on(devices[rank], config, context.share), context):
            if is_over.is_set():
                return

    threads = [
        threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(1, len(devices))
    ]
    for thread in threads:
        thread.start()
    first = context_of(0)
    model, draft = model_on(devices[0], config, first.share), draft_on(devices[0], first)
    with mock.patch.object(
        WorkerContext, "load_output", lambda *_, **__: model_on(devices[0], config, OUTPUT)
    ):
        worker = make_device_worker(devices[0], model, first, draft)
    while worker.has_idle_tasks:
        worker.run_idle_task()
    try:
        yield worker
    finally:
        is_over.set()
        nothing = slice(0, 0)
        last = PackedPlan(0, 0, 0, 0, HEADER_WORDS, nothing, nothing, nothing, nothing)
        assert first.ranks is not None
        RankBroadcaster(first.ranks).step(np.zeros(HEADER_WORDS, np.int32), last, None)
        for thread in threads:
            thread.join()
        os.close(descriptor)
