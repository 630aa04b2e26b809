"""GPU detection from device files and the environment, without loading a driver or torch.

Loading the driver would slow down startup and not help the executor, which is another process.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

_HAS_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"]", re.MULTILINE)


def default_device() -> Literal["cpu", "cuda"]:
    """Return the device that ``--device auto`` selects."""
    return "cuda" if sees_a_gpu(os.environ) and torch_is_cuda_build() else "cpu"


def sees_a_gpu(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether an NVIDIA GPU is visible.

    A container may have only /dev/nvidia3. WSL 2 has no device file per GPU, but one for GPUs of all vendors and a folder with
    NVIDIA's library.
    """
    if hides_all_gpus(environment.get("CUDA_VISIBLE_DEVICES")):
        return False
    if any((root / "dev").glob("nvidia[0-9]*")):
        return True
    return (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()


def num_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> int | None:
    """Return the number of visible NVIDIA GPUs; None if it is unknown from device files (WSL 2)."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    files = len(list((root / "dev").glob("nvidia[0-9]*")))
    if visible is None:
        return files or (None if sees_a_gpu(environment, root) else 0)
    names = visible.split(",")
    return next((count for count, name in enumerate(names) if hides_all_gpus(name)), len(names))


def hides_all_gpus(visible: str | None) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` hides all GPUs: CUDA ignores entries from the first invalid one on.

    Valid entries are indices, or UUIDs that start with ``GPU-`` or ``MIG-`` (CUDA C++ Programming Guide, "CUDA
    Environment Variables").
    """
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    return not (first.isdigit() or first.startswith(("GPU-", "MIG-")))


def torch_is_cuda_build(version: Path | None = None) -> bool:
    """Return whether torch was built for CUDA, from its version file, without importing torch."""
    if version is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return False
        version = Path(spec.origin).with_name("version.py")
    return version.is_file() and _HAS_CUDA.search(version.read_text()) is not None
