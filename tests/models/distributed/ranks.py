"""Ranks as threads of the test: everything but the processes, and the network between hosts, is real."""

from __future__ import annotations

import gc
import os
import queue
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
from tests.models.equality import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, RUN_DIR, Dtype, Loaded, with_blocks

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.registry import make_worker
from quintet.executor.context import RankMemory, WorkerContext
from quintet.executor.distributed.hosts.carrier import Carrier, Frames, read_head
from quintet.executor.distributed.hosts.hub import shown
from quintet.executor.distributed.hosts.messages import BEAT_S, Carried
from quintet.executor.distributed.parallel.follower_loop import follow
from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.distributed.parallel.pipeline_worker import PipelineWorker
from quintet.executor.worker import Worker
from quintet.wire.config import ActivationDtype, EngineConfig, HostsConfig, KvCacheDtype, Quantization


def config_of(
    folder: Path,
    size: int,
    stages: int,
    dtype: Dtype,
    quantization: Quantization,
    kv_cache_dtype: KvCacheDtype,
    swap_space: float | None,
    *,
    experts: bool,
    eplb: str | None = None,
    invariant: bool = False,
    activation_dtype: ActivationDtype = "auto",
    context: int = 1,
    max_model_len: int = MAX_MODEL_LEN,
    speculative_config: str | None = None,
    runner: Literal["auto", "pooling"] = "auto",
    lora_modules: Sequence[str] = (),
) -> EngineConfig:
    """Resolve as `quintet serve` does."""
    requested = Options(
        model=str(folder),
        dtype=dtype,
        quantization=quantization,
        activation_dtype=activation_dtype,
        kv_cache_dtype=kv_cache_dtype,
        device="cpu",
        max_model_len=max_model_len,
        max_num_seqs=16,
        block_size=BLOCK_SIZE,
        threads=1,
        kv_cache_memory="64MiB",
        swap_space=swap_space,
        tensor_parallel_size=size,
        decode_context_parallel_size=context,
        enable_expert_parallel=experts,
        enable_eplb=eplb is not None,
        eplb_config=eplb,
        layout_invariant=invariant,
        pipeline_parallel_size=stages,
        speculative_config=speculative_config,
        runner=runner,
        lora_modules=[*lora_modules],
    )
    return with_blocks(resolve(requested, RUN_DIR, http=False).config, NUM_BLOCKS)


@contextmanager
def in_ranks(
    folder: Path,
    size: int,
    dtype: Dtype = "float32",
    quantization: Quantization = "none",
    kv_cache_dtype: KvCacheDtype = "auto",
    swap_space: float | None = None,
    experts: bool = False,
    stages: int = 1,
    hosts: int = 1,
    change: Callable[[EngineConfig], EngineConfig] = lambda config: config,
    **switches: Any,
) -> Iterator[Loaded]:
    """Load a folder as `quintet serve --tensor-parallel-size --pipeline-parallel-size` does, and end all ranks on exit.

    Each has one thread. switches: more of `config_of`. change: a function applied to the configuration first.
    """
    gc.collect()  # ranks of other tests lie in cycles, each with descriptors of its memory and of its checkpoint
    requested = (folder, size, stages, dtype, quantization, kv_cache_dtype, swap_space)
    config = change(config_of(*requested, experts=experts, **switches))
    if hosts > 1:
        given = HostsConfig(count=hosts, address="", key_file="")
        executor = msgspec.structs.replace(config.executor, hosts=given)
        config = msgspec.structs.replace(config, executor=executor)
    counts = [
        range(stages * (size > 1)),
        range(stages * (stages > 1)),
        range(bool(config.cache.remote_tiers)),
    ]
    memories = [
        RankMemory(*(tuple(os.memfd_create("ranks") for _ in each) for each in counts)) for _ in range(hosts)
    ]
    is_over = threading.Event()

    def run_rank(rank: int) -> None:
        host = rank * hosts // (size * stages)
        own = config
        if host:
            own = msgspec.structs.replace(shown(config), model=config.model, executor=config.executor)
        for kind in follow(WorkerContext(own, memory=memories[host]), rank):
            if kind is OrderKind.IDLE_TASK and is_over.is_set():  # the last rank: it has received all parts
                return

    others = range(1, size * stages)
    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in others]
    for thread in threads:
        thread.start()
    with carried(config, memories) if hosts > 1 else nullcontext():
        worker = make_worker(config, memory=memories[0])
        assert isinstance(worker, Worker | PipelineWorker)
        try:
            yield Loaded(config, worker)  # type: ignore[arg-type]
        finally:
            is_over.set()
            worker.run_idle_task()
            for thread in threads:
                thread.join()
    for memory in memories:
        for descriptor in (*memory.stages, *memory.links, *memory.gather):
            os.close(descriptor)


@contextmanager
def carried(config: EngineConfig, memories: Sequence[RankMemory]) -> Iterator[None]:
    """Carry messages between hosts in this process. memories: of each host's ranks."""
    sent = queue.SimpleQueue[tuple[int, list[bytes]]]()
    is_over = threading.Event()

    def send(host: int, frames: Frames) -> None:
        sent.put((host, [bytes(frame) for frame in frames]))

    carriers = [
        Carrier(config, host, memory.links or memory.stages, send) for host, memory in enumerate(memories)
    ]
    decoder: msgspec.msgpack.Decoder[Carried] = msgspec.msgpack.Decoder(Carried)

    def carry() -> None:
        while not is_over.is_set():
            select.select(carriers, (), (), BEAT_S)
            for each in carriers:
                each.send_all()
                each.send_notes()
            while not sent.empty():
                host, received = sent.get()
                frames = [zmq.Frame(each) for each in received]
                carriers[host].take(read_head(decoder, frames), frames)

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
