"""What ranks on GPUs are refused: numbers without kernels, what only ranks on the CPU do, and more ranks than GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from quintet.deploy.config.device import num_gpus
from quintet.deploy.config.flags import Options
from quintet.wire.errors import ConfigError

FLAG = "--tensor-parallel-size"
SIZES = (2, 4, 8)
"""``quintet.executor.backends.cuda.ops.peers.SIZES``: who adds as a tree has a power of two, and eight GPUs reach
each other's memory.
"""


def check_gpu_ranks(
    options: Options, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Reject ranks that GPUs cannot be. Where nobody can count GPUs from files, the executor finds out."""
    size, engines = options.tensor_parallel_size, options.data_parallel_size
    only_on_cpus = (
        ("--pipeline-parallel-size", options.pipeline_parallel_size > 1),
        ("--enable-expert-parallel", options.enable_expert_parallel),
        ("--nnodes", options.nnodes > 1),
    )
    for flag, is_asked in only_on_cpus:
        if is_asked:
            raise ConfigError(f"{flag} is of ranks on the CPU so far: drop it, or add --device cpu")
    if size not in SIZES:
        raise ConfigError(
            f"{FLAG} {size}: on GPUs sums are added as a tree; sizes that fit: {', '.join(map(str, SIZES))}"
        )
    there = num_gpus(environment, root)
    if there is not None and there < size * engines:
        whose = f" of {engines} engines" if engines > 1 else ""
        raise ConfigError(
            f"{FLAG} {size}{whose} takes {size * engines} GPUs, one for each rank, and {there} can be seen: lower it, or see what"
            " CUDA_VISIBLE_DEVICES says"
        )
