"""KV on disk, the device's half: orders are done beside the loop, in time or not at all, and answered for their tables only."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from quintet.executor.disk.block_file import BlockFile
from quintet.executor.features import kv_disk
from quintet.executor.features.kv_disk import DiskBlocks
from quintet.wire.codec import pack_i32
from quintet.wire.kv_disk import KvAnswers, KvOrders

NUM_BLOCKS, LAYER_BYTES, FIRST = 6, 40, 10
KEYS = [bytes([number]) * 32 for number in range(1, 5)]


class Bench:
    """Two layers of KV memory with a disk, and the loop that waits for its answers."""

    def __init__(self, folder: Path) -> None:
        self.layers = [
            torch.arange(NUM_BLOCKS * LAYER_BYTES).reshape(NUM_BLOCKS, -1).to(torch.uint8) + layer
            for layer in range(2)
        ]
        file = BlockFile(folder / "engine-0", b"w" * 32, 2 * LAYER_BYTES, 8)
        self.disk = DiskBlocks(self.layers, file, 4, FIRST)
        self._rung = threading.Event()
        self.disk.begin(self._rung.set)

    def answers(self) -> KvAnswers:
        while True:
            assert self._rung.wait(30.0)
            self._rung.clear()
            answers = self.disk.take_answers()
            if answers is not None:  # a ring may have been for tables that are gone
                return answers


def stores(tables: int, *pairs: int) -> KvOrders:
    return KvOrders(tables, stores=pack_i32(pairs), store_keys=KEYS[: len(pairs) // 2])


def test_blocks_come_back_as_they_were_when_they_were_ordered(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    before = [layer.clone() for layer in bench.layers]
    bench.disk.order(stores(0, 2, 5, 3, 7))
    for layer in bench.layers:
        layer.zero_()  # the next plan gives the blocks other contents
    answers = bench.answers()
    while len(answers.stored) < 2:
        answers.stored += bench.answers().stored
    assert answers.stored == KEYS[:2] and not answers.unstored
    assert bench.disk.kept() == [(5, KEYS[0]), (7, KEYS[1])]
    fetches = pack_i32([7, FIRST + 1, 5, FIRST, 5, FIRST + 2])
    bench.disk.order(KvOrders(0, fetches=fetches, fetch_keys=[KEYS[1], KEYS[0], KEYS[3]]))
    answers = bench.answers()
    while len(answers.fetched) + len(answers.missed) < 12:
        more = bench.answers()
        answers.fetched += more.fetched
        answers.missed += more.missed
    assert answers.fetched == pack_i32([FIRST + 1, FIRST]) and answers.missed == pack_i32([FIRST + 2])
    assert answers.fetch_ns > 0
    bench.disk.copy_in(torch.tensor([0, 4]).numpy(), torch.tensor([FIRST, FIRST + 1]).numpy())
    for layer, original in zip(bench.layers, before, strict=True):
        assert torch.equal(layer[[0, 4]], original[[2, 3]])
    bench.disk.close()


def test_what_the_disk_cannot_keep_up_with_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_disk, "MAX_WAITING_BYTES", 0)
    bench = Bench(tmp_path)
    bench.disk.order(stores(0, 2, 5, 3, 7))
    assert bench.answers().unstored == KEYS[:2]
    bench.disk.close()
    assert not bench.disk.kept()


def test_answers_are_about_the_newest_tables(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.disk.order(stores(0, 2, 5))
    assert bench.answers().tables == 0
    bench.disk.order(stores(0, 3, 6))
    bench.disk.reset()
    bench.disk.order(stores(1, 4, 7))
    answers = bench.answers()
    while answers.tables == 0 or not answers.stored:
        answers = bench.answers()
    assert (answers.tables, answers.stored) == (1, KEYS[:1])
    bench.disk.close()
