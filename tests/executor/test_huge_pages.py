"""A reservation keeps what is written to it while its pages become huge, and asks for none where that is not wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quintet.executor.ops import huge_pages
from quintet.executor.ops.huge_pages import PAGE_BYTES, PIECE_BYTES, HugePages
from quintet.executor.platforms.memory_nodes import usable_nodes

SIZE = 3 * PIECE_BYTES - 12345


def switch(folder: Path, words: str) -> Path:
    path = folder / "enabled"
    path.write_text(words)
    return path


def scattered(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HugePages:
    """Return a reservation of which the first piece took too long."""
    monkeypatch.setattr(huge_pages, "SLACK_S", -1.0)
    pages = HugePages(SIZE, switch(folder, "always [madvise] never\n"))
    assert pages.is_scattered
    return pages


def test_it_is_zeros_of_the_size_asked_for(tmp_path: Path) -> None:
    for words in ("always [madvise] never\n", "always madvise [never]\n"):
        memory = HugePages(SIZE, switch(tmp_path, words)).memory
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
    monkeypatch.setattr(huge_pages, "SLACK_S", -1.0)
    path = tmp_path / "nowhere" if words is None else switch(tmp_path, words)
    assert not HugePages(SIZE, path).is_scattered


def test_pages_lie_on_all_nodes_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a machine of one node can tell: the system keeps the wish, and what is written stays."""
    policies = Path("/proc/self/numa_maps")
    if not policies.exists() or not usable_nodes():
        pytest.skip("a kernel without memory nodes")
    node = usable_nodes()[0]
    monkeypatch.setattr(huge_pages, "usable_nodes", lambda: [node, node])
    pages = HugePages(SIZE, switch(tmp_path, "always [madvise] never\n"))
    address = f"{pages.memory.data_ptr():x} interleave:{node}"
    assert any(line.startswith(address) for line in policies.read_text().splitlines()), address
    assert not pages.memory.any()
    pages.memory[::4096] = 7
    assert bool((pages.memory[::4096] == 7).all())
