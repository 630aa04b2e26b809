"""Messages where a GPU, or our kernels on one, cannot be used; no GPU is needed to fail."""

from __future__ import annotations

import sys

import pytest
import torch

from quintet.executor.backends.platforms.cuda import extra_for, open_cuda_device, open_platform
from quintet.executor.backends.registry import Unsupported
from quintet.wire.config import ExecutorConfig
from quintet.wire.errors import ConfigError

CONFIG = ExecutorConfig(device="cuda")
ALLOWED = ExecutorConfig(device="cuda", allow_torch_kernels=True)


def test_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"was built without CUDA.*--device cpu"):
        open_platform(CONFIG)


def test_driver_error_is_reported_verbatim(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ConfigError, match=r"built for CUDA 13\.0.*too old;.*nvidia-smi"):
        open_platform(CONFIG)


@pytest.fixture
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU according to torch, and no CuPy."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "quintet.executor.backends.cuda.cupy_device", raising=False)


@pytest.mark.usefixtures("without_cupy")
def test_without_cupy_the_server_does_not_start_and_names_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'quintet\[cuda12\]'.*--allow-torch-kernels"):
        open_cuda_device(CONFIG)


@pytest.mark.usefixtures("without_cupy")
def test_without_cupy_torch_computes_where_that_is_allowed() -> None:
    with pytest.raises(Unsupported, match=r"pip install 'quintet\[cuda12\]'"):
        open_cuda_device(ALLOWED)


@pytest.mark.usefixtures("without_cupy")
def test_batch_invariant_is_rejected_without_own_kernels() -> None:
    with pytest.raises(ConfigError, match=r"--batch-invariant.*CuPy"):
        open_cuda_device(ExecutorConfig(device="cuda", batch_invariant=True))


@pytest.mark.usefixtures("without_cupy")
def test_too_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(ConfigError, match=r"NVIDIA H200 has compute capability 7\.5; the kernels need 8\.0"):
        open_cuda_device(CONFIG)


@pytest.mark.parametrize(
    ("cuda", "extra"),
    [("12.8", "quintet[cuda12]"), ("13.0", "quintet[cuda13]"), (None, "quintet[cuda12] or quintet[cuda13]")],
)
def test_extra_matches_the_cuda_version_of_torch(cuda: str | None, extra: str) -> None:
    assert extra_for(cuda) == extra
