"""Available memory with limits of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.deploy.config.memory import available_ram_bytes


def limit_memory(folder: Path, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("4000\n")
    (folder / "memory.stat").write_text("anon 1\ninactive_file 300\n")


def test_container_memory_limit_applies(tmp_path: Path) -> None:
    system, root = tmp_path / "sys", tmp_path / "sys/fs/cgroup"
    limit_memory(root, "5000")
    assert available_ram_bytes(system) == 1300
    limit_memory(root, "max")
    assert available_ram_bytes(system) > 1300


@pytest.mark.parametrize("limited", ["job.slice", "job.slice/step"])
def test_memory_limit_of_any_parent_group_applies(tmp_path: Path, limited: str) -> None:
    system, root = tmp_path / "sys", tmp_path / "sys/fs/cgroup"
    for group in ("job.slice", "job.slice/step"):
        limit_memory(root / group, "5000" if group == limited else "9000")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job.slice/step\n")
    assert available_ram_bytes(system) == 1300


def test_memory_limit_of_a_version_1_group_applies(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/memory/job"
    group.mkdir(parents=True)
    for name, value in {"limit": 5000, "usage": 4000}.items():
        (group / f"memory.{name}_in_bytes").write_text(f"{value}\n")
    (group / "memory.stat").write_text("total_inactive_file 300\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job\n1:cpu,cpuacct:/other\n0::/\n")
    assert available_ram_bytes(tmp_path / "sys") == 1300
