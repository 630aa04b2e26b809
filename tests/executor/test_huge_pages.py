"""A reservation keeps what is written to it while its pages become huge, and asks for none where that is not wanted."""

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
    MIN_STALLS,
    PAGE_BYTES,
    PAGES_PER_STALL,
    PIECE_BYTES,
    HugeMemory,
)
from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.backends.platforms.memory_nodes import usable_nodes

SIZE = 3 * PIECE_BYTES - 12345
ALLOWED = "always [madvise] never\n"


def switch(folder: Path, words: str) -> Path:
    path = folder / "enabled"
    path.write_text(words)
    return path


def stalling(monkeypatch: pytest.MonkeyPatch, made: int, found_none: int, slack_s: float = -1.0) -> None:
    """Have the system count so many more stalls of both kinds whenever it is asked, which every thread does after each piece.

    With the default ``slack_s`` every piece takes too long. Whoever waits makes all ready alone.
    """
    counts = itertools.count()
    monkeypatch.setattr(huge_memory, "SLACK_S", slack_s)
    monkeypatch.setattr(huge_memory, "BYTES_PER_S", 1e18)
    monkeypatch.setattr(huge_memory, "_stalls", lambda: (made * (now := next(counts)), found_none * now))
    monkeypatch.setattr("quintet.executor.backends.cpu.ops.huge_pages.spare_threads", lambda: 0)


def reserved(folder: Path, words: str = ALLOWED) -> HugeMemory:
    return HugeMemory(SIZE, switch(folder, words))


def scattered(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HugePages:
    """Return a reservation for which the system had to make room."""
    stalling(monkeypatch, made=MIN_STALLS, found_none=0)
    pages = HugePages(SIZE, reserved(folder))
    assert pages.is_fragmented
    return pages


@pytest.mark.parametrize("words", [ALLOWED, "always madvise [never]\n"])
def test_it_is_zeros_of_the_size_asked_for(tmp_path: Path, words: str) -> None:
    memory = HugePages(SIZE, reserved(tmp_path, words)).memory
    assert (memory.dtype, memory.shape) == (torch.uint8, (SIZE,))
    assert memory.is_contiguous() and memory.data_ptr() % PAGE_BYTES == 0
    assert not memory.any()


def test_gathering_changes_nothing_and_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages = scattered(monkeypatch, tmp_path)
    written = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    pages.memory.copy_(written)
    address = pages.memory.data_ptr()
    rounds = 0
    while pages.is_fragmented:
        pages.gather(0.0)
        rounds += 1
        assert rounds <= SIZE // PAGE_BYTES, "a round moved nothing"
    assert pages.memory.data_ptr() == address
    assert torch.equal(pages.memory, written)


def test_a_round_takes_no_longer_than_asked_but_for_one_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages = scattered(monkeypatch, tmp_path)
    pages.gather(0.0)
    assert pages.is_fragmented, "all at once"


def test_memory_outlives_the_reservation() -> None:
    memory = HugePages(SIZE).memory[-4096:]
    memory.fill_(7)
    assert int(memory.sum()) == 7 * 4096


@pytest.mark.parametrize("words", ["always madvise [never]\n", None])
def test_nothing_is_asked_of_a_system_that_gives_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str | None
) -> None:
    stalling(monkeypatch, made=1000, found_none=1000)
    path = tmp_path / "nowhere" if words is None else switch(tmp_path, words)
    assert not HugePages(SIZE, HugeMemory(SIZE, path)).is_fragmented


@pytest.mark.parametrize(
    ("made", "found_none", "slack_s", "is_fragmented"),
    [
        (0, 0, -1e6, False),  # slow, as where a hypervisor gives memory when it is touched
        (MIN_STALLS - 1, 0, -1e6, True),  # with the second piece
        (MIN_STALLS // 3 - 1, 0, -1e6, False),  # as others might have made
        (MIN_STALLS, 0, 1e6, False),  # not slow
        (0, MIN_STALLS, 1e6, True),  # there are none, which takes no time
    ],
)
def test_scattered_is_memory_for_which_room_is_made_slowly_or_not_found(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    made: int,
    found_none: int,
    slack_s: float,
    is_fragmented: bool,
) -> None:
    stalling(monkeypatch, made, found_none, slack_s)
    assert HugePages(SIZE, reserved(tmp_path)).is_fragmented is is_fragmented


def test_what_counts_is_how_many_pages_there_are_to_a_stall(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One in nine is not enough, however many they are; one in seven is."""
    monkeypatch.setattr(huge_memory, "MIN_STALLS", 0)
    for pages, is_fragmented in ((PAGES_PER_STALL + 1, False), (PAGES_PER_STALL - 1, True)):
        monkeypatch.setattr(huge_memory, "PIECE_BYTES", pages * PAGE_BYTES)
        stalling(monkeypatch, made=1, found_none=0, slack_s=-1e6)
        assert HugePages(SIZE, reserved(tmp_path)).is_fragmented is is_fragmented


def test_where_the_system_does_not_count_whatever_is_slow_is_scattered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stalling(monkeypatch, 0, 0)
    monkeypatch.setattr(huge_memory, "_stalls", lambda: None)
    assert HugePages(SIZE, reserved(tmp_path)).is_fragmented


def test_what_is_begun_goes_on_meanwhile_and_whoever_takes_it_gives_back_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stalling(monkeypatch, 0, 0)
    ahead = HugeMemory(4 * SIZE, switch(tmp_path, ALLOWED))
    ahead.begin(2 * SIZE, 2)
    for thread in ahead._threads:
        thread.join()
    assert resident_bytes(ahead) == 6 * PIECE_BYTES
    ahead.shrink(SIZE)
    assert ahead.length == 3 * PIECE_BYTES == resident_bytes(ahead)
    assert len(ahead.map) == ahead.length + PAGE_BYTES
    pages = HugePages(SIZE, ahead)
    assert not pages.is_fragmented and not pages.memory.any()
    pages.memory.fill_(1)
    assert int(pages.memory.sum(dtype=torch.int64)) == SIZE


def test_what_was_found_scattered_meanwhile_is_so_for_whoever_takes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stalling(monkeypatch, made=MIN_STALLS, found_none=0)
    ahead = HugeMemory(4 * SIZE, switch(tmp_path, ALLOWED))
    ahead.begin(4 * SIZE, 1)
    for thread in ahead._threads:
        thread.join()
    assert resident_bytes(ahead) == PIECE_BYTES
    ahead.shrink(SIZE)
    pages = HugePages(SIZE, ahead)
    assert pages.is_fragmented
    pages.memory.fill_(3)
    pages.gather(60.0)
    assert not pages.is_fragmented
    assert int(pages.memory.sum(dtype=torch.int64)) == 3 * SIZE


def resident_bytes(memory: HugeMemory) -> int:
    """Return how much of the reservation is there, as the system says."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = (ctypes.c_ubyte * (memory.length // mmap.PAGESIZE))()
    asked = (ctypes.c_void_p(memory._address), ctypes.c_size_t(memory.length))
    assert libc.mincore(*asked, held) == 0, ctypes.get_errno()
    return sum(page & 1 for page in held) * mmap.PAGESIZE


def test_what_nobody_takes_is_given_back_whole(tmp_path: Path) -> None:
    ahead = reserved(tmp_path)
    ahead.begin(SIZE, 1)
    ahead.shrink(0)
    assert ahead.map.closed


def test_a_user_who_may_have_no_more_threads_makes_it_ready_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stalling(monkeypatch, 0, 0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ahead = reserved(tmp_path)
    ahead.begin(SIZE, 3)
    ahead.finish()
    assert resident_bytes(ahead) == ahead.length


def test_the_system_counts_what_makes_memory_scattered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(huge_memory, "COUNTS", counts)
    assert huge_memory._stalls() is None, "a system that does not count"
    counts.write_text("compact_stall 5\nthp_fault_fallback 2\nthp_fault_fallback_charge 50\n")
    assert huge_memory._stalls() == (5, 2)


def test_pages_lie_on_all_nodes_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a machine of one node can tell: the system keeps the wish, and what is written stays."""
    policies = Path("/proc/self/numa_maps")
    if not policies.exists() or not usable_nodes():
        pytest.skip("a kernel without memory nodes")
    node = usable_nodes()[0]
    monkeypatch.setattr(huge_memory, "usable_nodes", lambda: [node, node])
    pages = HugePages(SIZE, reserved(tmp_path))
    address = f"{pages.memory.data_ptr():x} interleave:{node}"
    assert any(line.startswith(address) for line in policies.read_text().splitlines()), address
    assert not pages.memory.any()
    pages.memory[::4096] = 7
    assert bool((pages.memory[::4096] == 7).all())
