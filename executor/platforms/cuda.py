"""Compute on one CUDA device through torch. Written against torch's interface; see ``docs/gpu.md`` for what was run."""

from __future__ import annotations

import torch

from quintet.executor.platforms.platform import Platform
from quintet.wire.config import ExecutorConfig
from quintet.wire.errors import ConfigError


def open_platform(config: ExecutorConfig) -> Platform:
    """Return the current CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device is 'cuda', but torch sees no CUDA device; install a CUDA build of torch and a driver, or use --device cpu"
        )
    if config.threads:
        torch.set_num_threads(config.threads)
    index = torch.cuda.current_device()
    return Platform("cuda", torch.device("cuda", index), torch.cuda.get_device_name(index))
