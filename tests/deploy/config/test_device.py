"""``--device auto``: a GPU if a visible one exists and torch supports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.deploy.config.device import hides_all_gpus, sees_a_gpu, torch_is_cuda_build


def machine(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def test_a_gpu_is_a_numbered_device_file(tmp_path: Path) -> None:
    assert not sees_a_gpu({}, machine(tmp_path, "dev/null", "dev/nvidiactl", "dev/nvidia-uvm"))
    assert sees_a_gpu({}, machine(tmp_path, "dev/nvidia3"))


def test_under_wsl_the_driver_library_is_a_gpu(tmp_path: Path) -> None:
    assert not sees_a_gpu({}, machine(tmp_path, "dev/dxg"))
    assert sees_a_gpu({}, machine(tmp_path, "usr/lib/wsl/lib/libcuda.so.1"))


def test_hidden_gpu_is_not_used(tmp_path: Path) -> None:
    root = machine(tmp_path, "dev/nvidia0")
    assert not sees_a_gpu({"CUDA_VISIBLE_DEVICES": ""}, root)
    assert sees_a_gpu({"CUDA_VISIBLE_DEVICES": "0"}, root)


@pytest.mark.parametrize("visible", ["", " ", "-1", "-1,0", "NoDevFiles", ",0"])
def test_visible_devices_end_at_the_first_invalid_one(visible: str) -> None:
    assert hides_all_gpus(visible)


@pytest.mark.parametrize("visible", [None, "0", "1,-1", " 2", "GPU-8932f937", "MIG-GPU-8932f937/1/2"])
def test_visible_device_is_used(visible: str | None) -> None:
    assert not hides_all_gpus(visible)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = '13.0'", True),
        ('cuda: str | None = "12.8"', True),
        ("cuda = '12.8'", True),
        ("cuda: Optional[str] = None", False),
        ("cuda: str | None = None", False),
        ("hip: Optional[str] = '6.4'", False),
    ],
)
def test_torch_build_is_read_from_its_version_file(tmp_path: Path, line: str, expected: bool) -> None:
    version = tmp_path / "version.py"
    version.write_text(f"debug = False\n{line}\ngit_version = 'cuda'\n")
    assert torch_is_cuda_build(version) is expected


def test_missing_torch_supports_no_gpu(tmp_path: Path) -> None:
    assert not torch_is_cuda_build(tmp_path / "version.py")
