"""Validation of tensor parallelism on GPUs: supported sizes, CPU-only flags, number of GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from quintet.deploy.config.device import num_gpus
from quintet.deploy.config.flags import Options
from quintet.wire.errors import ConfigError

FLAG = "--tensor-parallel-size"
SIZES = (2, 4, 8)
"""Equals ``quintet.executor.backends.cuda.ops.peers.SIZES``: all-reduce adds as a binary tree, over at most 8 GPUs with
peer access.
"""


def check_gpu_ranks(
    options: Options, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Reject unsupported ranks on GPUs. If GPUs cannot be counted here, the executor checks their number."""
    size, engines = options.tensor_parallel_size, options.data_parallel_size
    only_on_cpus = (
        ("--pipeline-parallel-size", options.pipeline_parallel_size > 1),
        ("--enable-expert-parallel", options.enable_expert_parallel),
        ("--nnodes", options.nnodes > 1),
    )
    for flag, is_set in only_on_cpus:
        if is_set:
            raise ConfigError(f"{flag} is supported on CPUs only: drop it, or add --device cpu")
    if size not in SIZES:
        raise ConfigError(f"{FLAG} is {size}; on GPUs it must be one of {', '.join(map(str, SIZES))}")
    num_visible = num_gpus(environment, root)
    if num_visible is not None and num_visible < size * engines:
        of_engines = f" with {engines} engines" if engines > 1 else ""
        raise ConfigError(
            f"{FLAG} {size}{of_engines} needs {size * engines} GPUs, one per rank, but {num_visible} are visible: lower it, or"
            " check CUDA_VISIBLE_DEVICES"
        )
