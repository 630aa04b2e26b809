"""A reservation keeps what is written to it while its pages become huge, and asks for none where that is not wanted."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from quintet.executor.ops.huge_pages import HugePages
from quintet.executor.platforms import huge_memory
from quintet.executor.platforms.huge_memory import PAGE_BYTES, PIECE_BYTES, HugeMemory
from quintet.executor.platforms.memory_nodes import usable_nodes

SIZE = 3 * PIECE_BYTES - 12345
ALLOWED = "always [madvise] never\n"


def switch(folder: Path, words: str) -> Path:
    path = folder / "enabled"
    path.write_text(words)
    return path


def slow(monkeypatch: pytest.MonkeyPatch, stalls: int) -> None:
    """Have every piece take too long, and the system count so many more stalls whenever it is asked."""
    counts = itertools.count(step=stalls)
    monkeypatch.setattr(huge_memory, "SLACK_S", -1.0)
    monkeypatch.setattr(huge_memory, "_stalls", lambda: next(counts))


def reserved(folder: Path, words: str = ALLOWED) -> HugeMemory:
    return HugeMemory(SIZE, switch(folder, words))


def scattered(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HugePages:
    """Return a reservation for which the system had to make room."""
    slow(monkeypatch, stalls=PIECE_BYTES // PAGE_BYTES)
    monkeypatch.setattr("quintet.executor.ops.huge_pages.helpers", lambda: 0)
    pages = HugePages(SIZE, reserved(folder))
    assert pages.is_scattered
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
    while pages.is_scattered:
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
    assert pages.is_scattered, "all at once"


def test_memory_outlives_the_reservation() -> None:
    memory = HugePages(SIZE).memory[-4096:]
    memory.fill_(7)
    assert int(memory.sum()) == 7 * 4096


@pytest.mark.parametrize("words", ["always madvise [never]\n", None])
def test_nothing_is_asked_of_a_system_that_gives_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str | None
) -> None:
    slow(monkeypatch, stalls=1000)
    path = tmp_path / "nowhere" if words is None else switch(tmp_path, words)
    assert not HugePages(SIZE, HugeMemory(SIZE, path)).is_scattered


def test_slow_memory_for_which_no_room_is_made_is_not_scattered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where a hypervisor gives it when it is touched: small pages would be as slow."""
    slow(monkeypatch, stalls=0)
    assert not HugePages(SIZE, reserved(tmp_path)).is_scattered


def test_what_is_begun_goes_on_meanwhile_and_whoever_takes_it_gives_back_the_rest(tmp_path: Path) -> None:
    ahead = HugeMemory(4 * SIZE, switch(tmp_path, ALLOWED))
    ahead.begin(2 * SIZE, 2)
    ahead.shrink(SIZE)
    assert ahead.length == 3 * PIECE_BYTES
    assert len(ahead.map) == ahead.length + PAGE_BYTES
    pages = HugePages(SIZE, ahead)
    assert not pages.is_scattered and not pages.memory.any()
    pages.memory.fill_(1)
    assert int(pages.memory.sum(dtype=torch.int64)) == SIZE


def test_what_nobody_takes_is_given_back_whole(tmp_path: Path) -> None:
    ahead = reserved(tmp_path)
    ahead.begin(SIZE, 1)
    ahead.shrink(0)
    assert ahead.map.closed


def test_the_system_counts_what_makes_memory_scattered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counts = tmp_path / "vmstat"
    monkeypatch.setattr(huge_memory, "COUNTS", counts)
    assert huge_memory._stalls() == 0, "a system that does not count"
    counts.write_text(
        "compact_stall 5\ncompact_stall_x 100\nthp_fault_fallback 2\nthp_fault_fallback_charge 50\n"
    )
    assert huge_memory._stalls() == 7


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
