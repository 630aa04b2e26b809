"""A model divided over ranks that are threads of the test: everything but the processes is real."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.models.equal import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, RUN_DIR, Dtype, Loaded, with_blocks

from quintet.deploy.resolve.build import resolve
from quintet.deploy.resolve.flags import Options
from quintet.executor.parallel.boot import open_ranks
from quintet.executor.parallel.following import follow
from quintet.executor.parallel.ranks import Ranks
from quintet.executor.platforms.platform import open_platform
from quintet.executor.worker import make_torch_worker
from quintet.wire.config import KvCacheDtype, Quantization


@contextmanager
def in_ranks(
    folder: Path,
    size: int,
    dtype: Dtype = "float32",
    quantization: Quantization = "none",
    kv_cache_dtype: KvCacheDtype = "auto",
    swap_space: float | None = None,
    experts: bool = False,
) -> Iterator[Loaded]:
    """Load a folder as `quintet serve --tensor-parallel-size` does, and end all ranks behind it. Each has one thread."""
    asked = Options(
        model=str(folder),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        block_size=BLOCK_SIZE,
        threads=1,
        kv_cache_memory="64MiB",
        swap_space=swap_space,
        tensor_parallel_size=size,
        enable_expert_parallel=experts,
    )
    config = with_blocks(resolve(asked, RUN_DIR, http=False).config, NUM_BLOCKS)
    memory = os.memfd_create("ranks")
    platform = open_platform(config.executor)
    first, *others = (open_ranks(config, memory, rank) for rank in range(size))
    is_over = threading.Event()

    def be_a_rank(ranks: Ranks) -> None:
        for _ in follow(config, platform, ranks):
            if is_over.is_set():
                return

    threads = [threading.Thread(target=be_a_rank, args=(ranks,), daemon=True) for ranks in others]
    worker = make_torch_worker(config, ranks=first)
    for thread in threads:
        thread.start()
    first.wait_for_all()
    try:
        yield Loaded(config, worker)
    finally:
        is_over.set()
        first.tell_chore()
        for thread in threads:
            thread.join()
        os.close(memory)
