"""CUDA platform: torch, and our kernels if CuPy and a form of the kernels that the driver accepts are installed.

``docs/gpu.md`` lists the tested configurations.
"""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.kernels.modules import MIN_CAPABILITY, modules
from quintet.executor.backends.platforms.cores import default_threads, usable_cores
from quintet.executor.backends.platforms.platform import Platform
from quintet.executor.backends.registry import Unsupported
from quintet.wire.config import ExecutorConfig
from quintet.wire.errors import ConfigError


def open_platform(config: ExecutorConfig) -> Platform:
    """Return the current CUDA device."""
    if torch.version.cuda is None:
        raise ConfigError(
            f"--device is 'cuda', but torch {torch.__version__} was built without CUDA;"
            " install a CUDA build of torch (pytorch.org, 'Get started'), or use --device cpu"
        )
    try:
        torch.cuda.init()
        index = torch.cuda.current_device()
    except RuntimeError as error:  # no driver, one too old for this torch, or no device
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--device is 'cuda', but torch (built for CUDA {torch.version.cuda}) cannot use a device: {reason};"
            " check `nvidia-smi`, or use --device cpu"
        ) from error
    if config.threads:
        torch.set_num_threads(config.threads)
    return Platform("cuda", torch.device("cuda", index), torch.cuda.get_device_name(index))


def open_cuda_device(config: ExecutorConfig) -> Device:
    """Return the process's CUDA device with all kernels loaded; call `open_platform` first.

    If they cannot be loaded: `Unsupported` with ``allow_torch_kernels``, otherwise `ConfigError`. Torch's operators are slow, not
    batch-invariant, and run on one GPU only.
    """
    size, count = config.tensor_parallel_size, torch.cuda.device_count()
    if size > max(1, count):
        raise ConfigError(
            f"--tensor-parallel-size {size} needs {size} GPUs, but {count} are available: lower it, or check `nvidia-smi`"
            " and CUDA_VISIBLE_DEVICES"
        )
    try:
        return _open(torch.cuda.current_device())
    except ConfigError as error:
        reason = f"Quintet's CUDA kernels cannot be loaded: {error}"
        for flag, is_set in (
            ("--tensor-parallel-size", size > 1),
            ("--batch-invariant", config.batch_invariant),
        ):
            if is_set:
                raise ConfigError(f"{flag} needs Quintet's CUDA kernels: {reason}") from error
        if not config.allow_torch_kernels:
            raise ConfigError(
                f"--device is 'cuda', but {reason}; alternatives: --allow-torch-kernels (torch's operators, slow), or"
                " --device cpu"
            ) from error
        raise Unsupported(reason) from error


def extra_for(cuda_version: str | None) -> str:
    """Return the extra that installs CuPy for torch's version of CUDA."""
    major = (cuda_version or "").partition(".")[0]
    return f"quintet[cuda{major}]" if major in {"12", "13"} else "quintet[cuda12] or quintet[cuda13]"


def _open(index: int) -> Device:
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]};"
            f" the kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or later"
        )
    try:
        from quintet.executor.backends.cuda.cupy_device import CupyDevice
    except ImportError as error:
        raise ConfigError(
            f"CuPy, which loads the kernels, cannot be imported ({error});"
            f" install it with `pip install '{extra_for(torch.version.cuda)}'`"
        ) from error
    device = CupyDevice(index)
    device.load_all(modules(), default_threads(usable_cores()))
    return device
