"""Number of cores the executor uses (affinity, hyperthreads, container quotas), thread pinning and memory nodes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from tests.executor.test_executor_process import config_of

from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.backends.platforms import shares
from quintet.executor.backends.platforms.cores import default_threads, usable_cores, usable_nodes
from quintet.executor.backends.platforms.shares import devices_of, share_of


def machine(root: Path, siblings: dict[int, str], **files: str) -> Path:
    """Write the part of ``/sys`` that the executor reads."""
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
def test_a_container_quota_limits_cores(tmp_path: Path, quota: str, expected: int) -> None:
    assert usable_cores({0, 1, 2, 3}, machine(tmp_path, {}, cpu_max=quota)) == expected


@pytest.mark.parametrize(
    ("line", "limits"),
    [
        ("0::/job/step", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "max 100000"}),
        ("0::/job/step", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "200000 100000"}),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"}),
        ("0::/../other", {"cpu.max": "200000 100000"}),
    ],
)
def test_the_smallest_quota_of_all_parent_groups_limits_cores(
    tmp_path: Path, line: str, limits: dict[str, str]
) -> None:
    for name, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    assert usable_cores({0, 1, 2}, tmp_path / "sys") == 2


def test_a_cgroup_v1_quota_limits_cores(tmp_path: Path) -> None:
    group = tmp_path / "fs/cgroup/cpu"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("200000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores({0, 1, 2}, tmp_path) == 2
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores({0, 1, 2}, tmp_path) == 3


def test_small_machines_use_every_core() -> None:
    assert [default_threads(cores) for cores in (1, 2, 4, 8, 16, 64)] == [1, 2, 4, 7, 14, 56]


def pinned(root: Path, processors: list[int]) -> list[int]:
    """Return the processors of the compute threads, in order."""
    library = open_library()
    if library is None:
        pytest.skip("the host kernels are not built")
    order = (ctypes.c_int * len(processors))(*processors)
    address, size = ctypes.c_void_p, ctypes.c_int64
    declare(library, "qt_in_order_of_cores", address, size, ctypes.c_char_p)(
        order, len(processors), str(root).encode()
    )
    return list(order)


def test_pinned_threads_take_free_cores_first(tmp_path: Path) -> None:
    adjacent = machine(tmp_path / "adjacent", {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4-5", 5: "4-5"})
    assert pinned(adjacent, [0, 1, 2, 3, 4, 5]) == [0, 2, 4, 1, 3, 5]
    apart = machine(tmp_path / "apart", {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert pinned(apart, [0, 1, 2, 3]) == [0, 1, 2, 3]
    # A mask may exclude the first processor of a core, and the system may not report it.
    assert pinned(adjacent, [1, 2, 3, 4]) == [1, 2, 4, 3]
    assert pinned(tmp_path / "silent", [3, 7, 9]) == [3, 7, 9]


PINNING = """
import os, sys, threading
from quintet.executor.backends.cpu.ops.host_library import open_library, set_threads
before = os.sched_getaffinity(0)
set_threads(open_library(), len(before), True)
tasks = [int(task) for task in os.listdir("/proc/self/task")]
import time
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    masks = [os.sched_getaffinity(task) for task in tasks]
    alone = [mask for mask in masks if len(mask) == 1]
    if set().union(*alone) == before if alone else False:
        sys.exit(0)
    time.sleep(0.01)
sys.exit(f"{masks} of {before}")
"""


TORCH_THREADS_NOT_PINNED = """
import os, sys
import torch
from quintet.executor.backends.platforms.cpu import open_platform
from quintet.wire.config import ExecutorConfig
before = os.sched_getaffinity(0)
open_platform(ExecutorConfig(threads=2, pin_threads=True))
assert len(os.sched_getaffinity(0)) == 1
others = set(os.listdir("/proc/self/task"))
torch.ones(1 << 20).exp_()
masks = [os.sched_getaffinity(int(task)) for task in set(os.listdir("/proc/self/task")) - others]
assert all(mask == before for mask in masks), f"{masks} of {before}"
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: pinning changes nothing")
def test_torch_threads_are_not_pinned() -> None:
    """Torch starts the same number of threads, which would share one processor."""
    if open_library() is None:
        pytest.skip("the host kernels are not built")
    words = [sys.executable, "-c", TORCH_THREADS_NOT_PINNED]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pinned_threads_take_every_processor_of_the_mask() -> None:
    if open_library() is None:
        pytest.skip("the host kernels are not built")
    done = subprocess.run([sys.executable, "-c", PINNING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_nodes_are_those_of_the_affinity_mask(tmp_path: Path) -> None:
    for node, processors in {0: "0-3,16", 1: "4-7", 2: "8", 3: ""}.items():
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    assert usable_nodes({2, 3}, tmp_path) == [0]
    assert usable_nodes({16, 5, 6, 8}, tmp_path) == [0, 1, 2]
    assert usable_nodes({99}, tmp_path) == []
    assert usable_nodes({0}, tmp_path / "absent") == []


def test_a_pinned_thread_uses_the_nodes_of_all_threads(tmp_path: Path) -> None:
    """The thread that loads weights is pinned."""
    processors = sorted(os.sched_getaffinity(0))
    for node, first in enumerate(processors):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{first}\n")

    def read_nodes() -> list[int]:
        os.sched_setaffinity(0, processors[:1])
        return usable_nodes(system=tmp_path)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(read_nodes).result() == list(range(len(processors)))


SHARING = """
import os, sys, threading
from pathlib import Path
import msgspec
from quintet.executor.backends.platforms.cores import usable_nodes
from quintet.executor.backends.platforms.shares import take_share
from quintet.wire.config import EngineConfig
threading.Thread(target=threading.Event().wait, daemon=True).start()
taken = take_share(0, msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig), 1).executor
print(len(os.sched_getaffinity(0)), len(usable_nodes(system=Path(sys.argv[1]))), int(taken.has_own_cores))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: no share to take")
def test_threads_started_before_the_share_are_moved_to_it(tmp_path: Path) -> None:
    """For example the heartbeat thread: a rank allocates weights on the nodes of any of its threads."""
    for node, processor in enumerate(os.sched_getaffinity(0)):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{processor}\n")
    config = msgspec.json.encode(config_of(tmp_path, tensor_parallel_size=2))
    words = [sys.executable, "-c", SHARING, str(tmp_path)]
    done = subprocess.run(words, input=config, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    num_processors, num_nodes, has_own = map(int, done.stdout.split())
    assert num_nodes == num_processors < len(os.sched_getaffinity(0))
    assert has_own == (usable_cores() >= 2)


@pytest.mark.parametrize(
    ("num_cores", "index", "flags", "expected"),
    [
        (4, 0, {}, (1, True)),
        (4, 0, {"threads": 2}, (2, False)),
        (3, 0, {}, (1, False)),
        (4, 2, {}, (1, False)),  # an additional engine shares the cores of another
        (1, 0, {}, (1, False)),
    ],
)
def test_ranks_spin_only_if_all_threads_have_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_cores: int,
    index: int,
    flags: dict[str, int],
    expected: tuple[int, bool],
) -> None:
    """The cores of the machine limit the number, as ranks with their own cores cannot be counted; so does a container quota."""
    monkeypatch.setattr(shares, "usable_cores", lambda: num_cores)
    monkeypatch.setattr(shares, "keep_to", lambda processors: None)
    config = config_of(tmp_path, tensor_parallel_size=2, **flags)
    config = msgspec.structs.replace(config, processes=msgspec.structs.replace(config.processes, engines=2))
    taken = shares.take_share(index, config, 1).executor
    assert (taken.threads, taken.has_own_cores) == expected


def test_engines_divide_cores_by_memory_node(tmp_path: Path) -> None:
    """Processors 0-3 and their hardware threads 8-11 are one node, the rest the other."""
    system = machine(tmp_path, {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)})
    for node, text in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        folder = system / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    everything = set(range(16))
    assert share_of(everything, 0, 1, system) == everything
    assert share_of(everything, 1, 2, system) == {4, 5, 6, 7, 12, 13, 14, 15}
    shares = [share_of(everything, index, 3, system) for index in range(3)]
    assert sorted(map(len, shares)) == [4, 6, 6] and set().union(*shares) == everything
    assert share_of({0, 8}, 1, 2, system) == {0, 8}  # one core cannot be divided


def test_each_engine_takes_the_next_visible_gpu() -> None:
    assert [devices_of(index, 0, 1, None) for index in range(2)] == ["0", "1"]
    assert [devices_of(index, 0, 1, "3,GPU-5") for index in range(3)] == ["3", "GPU-5", ""]


def test_each_rank_sees_its_gpu_first_then_those_of_its_engine() -> None:
    assert [devices_of(0, rank, 2, None) for rank in range(2)] == ["0,1", "1,0"]
    assert [devices_of(1, rank, 2, "7,6,5,4") for rank in range(2)] == ["5,4", "4,5"]
    assert devices_of(0, 2, 4, None) == "2,3,0,1"
    assert devices_of(0, 1, 2, "3") == ",3", "CUDA must see no device"
