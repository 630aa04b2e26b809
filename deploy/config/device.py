"""Whether this machine has a GPU to compute on: told from files and the environment, without loading a driver or torch.

A driver loaded here would be of no use to the executor, which is another process, and takes a moment of every boot.
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
    """Return what ``--device auto`` means here."""
    return "cuda" if sees_a_gpu(os.environ) and torch_is_cuda_build() else "cpu"


def sees_a_gpu(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether there is an NVIDIA GPU that this environment does not hide.

    A container may have been given the third one only. Under Windows (WSL 2) there is no file per GPU, but one for all
    makers' GPUs and a folder with NVIDIA's library.
    """
    if hides_all_gpus(environment.get("CUDA_VISIBLE_DEVICES")):
        return False
    if any((root / "dev").glob("nvidia[0-9]*")):
        return True
    return (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()


def num_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> int | None:
    """Return how many NVIDIA GPUs there are that this environment does not hide; None where files do not tell (WSL 2)."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    files = len(list((root / "dev").glob("nvidia[0-9]*")))
    if visible is None:
        return files or (None if sees_a_gpu(environment, root) else 0)
    names = visible.split(",")
    return next((count for count, name in enumerate(names) if hides_all_gpus(name)), len(names))


def hides_all_gpus(visible: str | None) -> bool:
    """Return whether a value of ``CUDA_VISIBLE_DEVICES`` shows no GPU: the list ends at its first entry that is none.

    Entries are numbers, or unique names that begin with ``GPU-`` or ``MIG-`` (CUDA C++ Programming Guide, "CUDA
    Environment Variables").
    """
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    return not (first.isdigit() or first.startswith(("GPU-", "MIG-")))


def torch_is_cuda_build(version: Path | None = None) -> bool:
    """Tell from torch's version file, without importing torch, whether it was built for CUDA."""
    if version is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return False
        version = Path(spec.origin).with_name("version.py")
    return version.is_file() and _HAS_CUDA.search(version.read_text()) is not None
