"""CPU platform: the compiled kernels of ``csrc/cpu``, or torch if they are not built."""

from __future__ import annotations

import logging

import torch

from quintet.executor.backends.cpu.ops.host_library import (
    instruction_set,
    instruction_set_refusal,
    open_library,
    set_threads,
)
from quintet.executor.backends.platforms.cores import default_threads, usable_cores
from quintet.executor.backends.platforms.platform import Platform
from quintet.wire.config import ExecutorConfig

log = logging.getLogger(__name__)

TORCH_GRAIN = 1 << 15
"""Minimum number of elements per thread of torch's elementwise operations (``at::internal::GRAIN_SIZE``)."""


def open_platform(config: ExecutorConfig) -> Platform:
    """Start the compute threads and return the CPU."""
    threads = config.threads or default_threads(usable_cores())
    torch.set_num_threads(threads)
    library = open_library()
    if library is None:
        return Platform("cpu", torch.device("cpu"), f"cpu, threads: {threads}, kernels: torch")
    if config.pin_threads:
        _start_torch_threads(threads)
    set_threads(library, threads, config.pin_threads)
    pinned = " (pinned)" if config.pin_threads else ""
    kernels = instruction_set(library)
    refusal = instruction_set_refusal(library)
    if refusal is not None:
        log.warning("instruction set %s; using %s", refusal, kernels)
    return Platform("cpu", torch.device("cpu"), f"cpu, threads: {threads}{pinned}, kernels: {kernels}")


def _start_torch_threads(threads: int) -> None:
    """Start torch's threads: they inherit the affinity of this thread, which is about to be pinned to one processor."""
    torch.ones(threads * TORCH_GRAIN).neg_()
