"""Huge-page reservations: contents survive page migration, and no huge pages are requested where disabled."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from pathlib import Path

import pytest
import torch

from quintet.executor.backends.cpu.ops import huge_memory
from quintet.executor.backends.cpu.ops.huge_memory import (
    CHUNK_BYTES,
    MIN_STALLS,
    PAGE_BYTES,
    PAGES_PER_STALL,
    HugeMemory,
)
from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.backends.platforms.cores import usable_nodes

SIZE = 3 * CHUNK_BYTES - 12345
ALLOWED = "always [madvise] never\n"


def write_huge_page_setting(folder: Path, words: str) -> Path:
    path = folder / "enabled"
    path.write_text(words)
    return path


def simulate_stalls(
    monkeypatch: pytest.MonkeyPatch, num_compactions: int, num_fallbacks: int, slack_s: float = -1.0
) -> None:
    """Make the system count more stalls of both kinds at each reading; every thread reads after each chunk.

    With the default ``slack_s`` every chunk is too slow. The thread that waits prepares all chunks alone.
    """
    counts = itertools.count()
    monkeypatch.setattr(huge_memory, "SLACK_S", slack_s)
    monkeypatch.setattr(huge_memory, "BYTES_PER_S", 1e18)
    monkeypatch.setattr(
        huge_memory, "_stalls", lambda: (num_compactions * (now := next(counts)), num_fallbacks * now)
    )
    monkeypatch.setattr("quintet.executor.backends.cpu.ops.huge_pages.spare_threads", lambda: 0)


def reserved(folder: Path, words: str = ALLOWED) -> HugeMemory:
    return HugeMemory(SIZE, write_huge_page_setting(folder, words))


def scattered(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HugePages:
    """Return a reservation for which the system compacted memory."""
    simulate_stalls(monkeypatch, num_compactions=MIN_STALLS, num_fallbacks=0)
    pages = HugePages(SIZE, reserved(folder))
    assert pages.is_fragmented
    return pages


@pytest.mark.parametrize("words", [ALLOWED, "always madvise [never]\n"])
def test_a_reservation_is_zeroed_and_of_the_requested_size(tmp_path: Path, words: str) -> None:
    memory = HugePages(SIZE, reserved(tmp_path, words)).memory
    assert (memory.dtype, memory.shape) == (torch.uint8, (SIZE,))
    assert memory.is_contiguous() and memory.data_ptr() % PAGE_BYTES == 0
    assert not memory.any()


def test_defragmenting_keeps_contents_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages = scattered(monkeypatch, tmp_path)
    written = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    pages.memory.copy_(written)
    address = pages.memory.data_ptr()
    rounds = 0
    while pages.is_fragmented:
        pages.gather(0.0)
        rounds += 1
        assert rounds <= SIZE // PAGE_BYTES, "each round must move at least one page"
    assert pages.memory.data_ptr() == address
    assert torch.equal(pages.memory, written)


def test_a_round_exceeds_its_time_limit_by_at_most_one_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages = scattered(monkeypatch, tmp_path)
    pages.gather(0.0)
    assert pages.is_fragmented, "the round must stop early"


def test_memory_outlives_the_reservation() -> None:
    memory = HugePages(SIZE).memory[-4096:]
    memory.fill_(7)
    assert int(memory.sum()) == 7 * 4096


@pytest.mark.parametrize("words", ["always madvise [never]\n", None])
def test_no_huge_pages_are_requested_where_disabled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str | None
) -> None:
    simulate_stalls(monkeypatch, num_compactions=1000, num_fallbacks=1000)
    path = tmp_path / "nowhere" if words is None else write_huge_page_setting(tmp_path, words)
    assert not HugePages(SIZE, HugeMemory(SIZE, path)).is_fragmented


@pytest.mark.parametrize(
    ("num_compactions", "num_fallbacks", "slack_s", "is_fragmented"),
    [
        (0, 0, -1e6, False),  # slow, as on a hypervisor that allocates memory at the first access
        (MIN_STALLS - 1, 0, -1e6, True),  # reached with the second chunk
        (MIN_STALLS // 3 - 1, 0, -1e6, False),  # few enough for other processes to have caused them
        (MIN_STALLS, 0, 1e6, False),  # not slow
        (0, MIN_STALLS, 1e6, True),  # no huge pages, and failing takes no time
    ],
)
def test_memory_is_fragmented_if_compaction_is_slow_or_fails(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_compactions: int,
    num_fallbacks: int,
    slack_s: float,
    is_fragmented: bool,
) -> None:
    simulate_stalls(monkeypatch, num_compactions, num_fallbacks, slack_s)
    assert HugePages(SIZE, reserved(tmp_path)).is_fragmented is is_fragmented


def test_fragmentation_depends_on_stalls_per_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One stall in nine pages is too few, whatever their number; one in seven is enough."""
    monkeypatch.setattr(huge_memory, "MIN_STALLS", 0)
    for pages, is_fragmented in ((PAGES_PER_STALL + 1, False), (PAGES_PER_STALL - 1, True)):
        monkeypatch.setattr(huge_memory, "CHUNK_BYTES", pages * PAGE_BYTES)
        simulate_stalls(monkeypatch, num_compactions=1, num_fallbacks=0, slack_s=-1e6)
        assert HugePages(SIZE, reserved(tmp_path)).is_fragmented is is_fragmented


def test_without_counters_slow_memory_is_fragmented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulate_stalls(monkeypatch, 0, 0)
    monkeypatch.setattr(huge_memory, "_stalls", lambda: None)
    assert HugePages(SIZE, reserved(tmp_path)).is_fragmented


def test_prefault_runs_in_the_background_and_taking_frees_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulate_stalls(monkeypatch, 0, 0)
    ahead = HugeMemory(4 * SIZE, write_huge_page_setting(tmp_path, ALLOWED))
    ahead.begin(2 * SIZE, 2)
    for thread in ahead._threads:
        thread.join()
    assert resident_bytes(ahead) == 6 * CHUNK_BYTES
    ahead.shrink(SIZE)
    assert ahead.length == 3 * CHUNK_BYTES == resident_bytes(ahead)
    assert len(ahead.map) == ahead.length + PAGE_BYTES
    pages = HugePages(SIZE, ahead)
    assert not pages.is_fragmented and not pages.memory.any()
    pages.memory.fill_(1)
    assert int(pages.memory.sum(dtype=torch.int64)) == SIZE


def test_fragmentation_found_by_the_prefault_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulate_stalls(monkeypatch, num_compactions=MIN_STALLS, num_fallbacks=0)
    ahead = HugeMemory(4 * SIZE, write_huge_page_setting(tmp_path, ALLOWED))
    ahead.begin(4 * SIZE, 1)
    for thread in ahead._threads:
        thread.join()
    assert resident_bytes(ahead) == CHUNK_BYTES
    ahead.shrink(SIZE)
    pages = HugePages(SIZE, ahead)
    assert pages.is_fragmented
    pages.memory.fill_(3)
    pages.gather(60.0)
    assert not pages.is_fragmented
    assert int(pages.memory.sum(dtype=torch.int64)) == 3 * SIZE


def resident_bytes(memory: HugeMemory) -> int:
    """Return the number of resident bytes of the reservation, as the system reports it."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = (ctypes.c_ubyte * (memory.length // mmap.PAGESIZE))()
    region = (ctypes.c_void_p(memory._address), ctypes.c_size_t(memory.length))
    assert libc.mincore(*region, held) == 0, ctypes.get_errno()
    return sum(page & 1 for page in held) * mmap.PAGESIZE


def test_an_unused_reservation_is_freed(tmp_path: Path) -> None:
    ahead = reserved(tmp_path)
    ahead.begin(SIZE, 1)
    ahead.shrink(0)
    assert ahead.map.closed


def test_without_more_threads_the_caller_prefaults_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    simulate_stalls(monkeypatch, 0, 0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ahead = reserved(tmp_path)
    ahead.begin(SIZE, 3)
    ahead.finish()
    assert resident_bytes(ahead) == ahead.length


def test_stall_counters_are_read_from_vmstat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(huge_memory, "COUNTS", counts)
    assert huge_memory._stalls() is None, "a system without counters"
    counts.write_text("compact_stall 5\nthp_fault_fallback 2\nthp_fault_fallback_charge 50\n")
    assert huge_memory._stalls() == (5, 2)


def test_pages_are_interleaved_over_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check on one node that the system keeps the policy and the memory keeps its contents."""
    policies = Path("/proc/self/numa_maps")
    if not policies.exists() or not usable_nodes():
        pytest.skip("the kernel has no memory nodes")
    node = usable_nodes()[0]
    monkeypatch.setattr(huge_memory, "usable_nodes", lambda: [node, node])
    pages = HugePages(SIZE, reserved(tmp_path))
    address = f"{pages.memory.data_ptr():x} interleave:{node}"
    assert any(line.startswith(address) for line in policies.read_text().splitlines()), address
    assert not pages.memory.any()
    pages.memory[::4096] = 7
    assert bool((pages.memory[::4096] == 7).all())
