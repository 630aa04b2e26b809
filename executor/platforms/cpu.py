"""Compute on the processor with torch's own thread pool."""

from __future__ import annotations

import os

import torch

from quintet.executor.platforms.platform import Platform
from quintet.wire.config import ExecutorConfig


def open_platform(config: ExecutorConfig) -> Platform:
    """Set the number of compute threads and return the CPU."""
    torch.set_num_threads(config.threads or default_threads(len(os.sched_getaffinity(0))))
    return Platform("cpu", torch.device("cpu"), f"cpu, {torch.get_num_threads()} threads")


def default_threads(num_cores: int) -> int:
    """Leave one core in four (at least one of two or more) to the other processes of the server.

    A thread pool as wide as the machine makes every parallel region wait for the thread whose core the core or the
    frontend just took.
    """
    return max(1, num_cores - max(1, num_cores // 4))
