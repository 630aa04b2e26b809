"""How many cores the executor takes: affinity, hyperthreads, container quotas."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.executor.platforms.cores import default_threads, usable_cores


def machine(root: Path, siblings: dict[int, str], **files: str) -> Path:
    """Write as much of ``/sys`` as is read."""
    for thread, text in siblings.items():
        folder = root / f"devices/system/cpu/cpu{thread}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    for name, text in files.items():
        path = root / "fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_two_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"})
    assert usable_cores({0, 1, 4, 5}, system) == 2
    assert usable_cores({0, 4}, system) == 1


def test_without_topology_each_thread_is_a_core(tmp_path: Path) -> None:
    assert usable_cores({0, 1, 2}, tmp_path) == 3


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 4), ("250000 100000", 3), ("50000 100000", 1), ("nonsense", 4)]
)
def test_a_container_quota_bounds_them(tmp_path: Path, quota: str, expected: int) -> None:
    assert usable_cores({0, 1, 2, 3}, machine(tmp_path, {}, cpu_max=quota)) == expected


def test_an_older_control_group_counts_too(tmp_path: Path) -> None:
    group = tmp_path / "fs/cgroup/cpu"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("200000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores({0, 1, 2}, tmp_path) == 2
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores({0, 1, 2}, tmp_path) == 3


def test_small_machines_compute_on_every_core() -> None:
    assert [default_threads(cores) for cores in (1, 2, 4, 8, 16, 64)] == [1, 2, 4, 7, 14, 56]
