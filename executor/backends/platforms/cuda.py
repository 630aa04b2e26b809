"""Open one CUDA device: for torch, and for our kernels where CuPy and a form of them that the driver takes are installed.

Written against the interfaces of torch and CuPy; ``docs/gpu.md`` says what was run.
"""

from __future__ import annotations

import logging

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.modules import OLDEST
from quintet.executor.backends.cuda.sources import modules
from quintet.executor.backends.platforms.cores import default_threads, usable_cores
from quintet.executor.backends.platforms.platform import Platform
from quintet.wire.config import ExecutorConfig
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)


def open_platform(config: ExecutorConfig) -> Platform:
    """Return the current CUDA device."""
    if torch.version.cuda is None:
        raise ConfigError(
            f"--device is 'cuda', but torch {torch.__version__} was built without CUDA;"
            " install a CUDA build of it (pytorch.org, 'Get started'), or use --device cpu"
        )
    try:
        torch.cuda.init()
        index = torch.cuda.current_device()
    except RuntimeError as error:  # no driver, one too old for this torch, or no device
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--device is 'cuda', but torch (built for CUDA {torch.version.cuda}) cannot use a device: {reason};"
            " see what `nvidia-smi` says, or use --device cpu"
        ) from error
    if config.threads:
        torch.set_num_threads(config.threads)
    return Platform("cuda", torch.device("cuda", index), torch.cuda.get_device_name(index))


def open_cuda_device(config: ExecutorConfig) -> Device | None:
    """Return the current CUDA device with all kernels loaded; call `open_platform` first.

    Where they cannot be loaded: None after a warning with ``allow_torch_kernels``, else `ConfigError`. Torch's operators are
    slow and not batch-invariant, so ``batch_invariant`` always needs the kernels.
    """
    try:
        return _open(torch.cuda.current_device())
    except ConfigError as error:
        if config.batch_invariant:
            raise ConfigError(
                f"--batch-invariant needs Quintet's CUDA kernels, which cannot be loaded: {error}"
            ) from error
        if not config.allow_torch_kernels:
            raise ConfigError(
                f"--device is 'cuda', but Quintet's CUDA kernels cannot be loaded: {error}; or compute with torch's operators,"
                " slowly: --allow-torch-kernels; or use --device cpu"
            ) from error
        log.warning("computing with torch's operators: Quintet's CUDA kernels cannot be loaded: %s", error)
        return None


def open_rank_device(config: ExecutorConfig) -> Device:
    """Return the device of one of several ranks, the first that its process sees, with our kernels loaded; else `ConfigError`.

    Call `open_platform` first.
    """
    size, count = config.tensor_parallel_size, torch.cuda.device_count()
    if count < size:
        raise ConfigError(
            f"--tensor-parallel-size {size} takes a GPU for each rank, and {count} can be used: lower it, or see what"
            " `nvidia-smi` and CUDA_VISIBLE_DEVICES say"
        )
    try:
        return _open(torch.cuda.current_device())
    except ConfigError as error:
        raise ConfigError(
            f"--tensor-parallel-size needs our kernels, and they cannot be used: {error}"
        ) from error


def extra_for(cuda_version: str | None) -> str:
    """Return which of our extras installs the CuPy for a torch built for this version of CUDA."""
    major = (cuda_version or "").partition(".")[0]
    return f"quintet[cuda{major}]" if major in {"12", "13"} else "quintet[cuda12] or quintet[cuda13]"


def _open(index: int) -> Device:
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        raise ConfigError(
            f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]};"
            f" they need {OLDEST[0]}.{OLDEST[1]} or later"
        )
    try:
        from quintet.executor.backends.cuda.cupy_device import CupyDevice
    except ImportError as error:
        raise ConfigError(
            f"CuPy, which loads them, cannot be imported ({error});"
            f" install it with `pip install '{extra_for(torch.version.cuda)}'`"
        ) from error
    device = CupyDevice(index)
    device.load_all(modules(), default_threads(usable_cores()))
    return device
