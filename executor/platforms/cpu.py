"""Compute on the processor: torch and the compiled host kernels, on one OpenMP thread pool."""

from __future__ import annotations

import os

import torch

from quintet.executor.ops.host_library import host_library
from quintet.executor.platforms.platform import Platform
from quintet.wire.config import ExecutorConfig


def open_platform(config: ExecutorConfig) -> Platform:
    """Set the number of compute threads and return the CPU."""
    torch.set_num_threads(config.threads or default_threads(len(os.sched_getaffinity(0))))
    kernels = "torch's kernels" if host_library() is None else "own kernels (AVX-512 BF16)"
    return Platform("cpu", torch.device("cpu"), f"cpu, threads: {torch.get_num_threads()}, {kernels}")


def default_threads(num_cores: int) -> int:
    """Leave one core in four (at least one of two or more) to the other processes of the server.

    A thread pool as wide as the machine makes every parallel region wait for the thread whose core the core or the
    frontend just took.
    """
    return max(1, num_cores - max(1, num_cores // 4))
