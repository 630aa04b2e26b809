"""Graph sizes and KV memory, computed without a device."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from quintet.executor.backends.cuda.graphs import DecodeGraphs, padded_sizes
from quintet.executor.backends.cuda.kv_memory import graph_bytes, kv_bytes


def test_sizes_end_at_the_limit_and_pad_by_at_most_an_eighth() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(3) == [1, 2, 3]
    assert padded_sizes(20) == [1, 2, 4, 8, 16, 20]
    sizes = padded_sizes(1024)
    assert sizes[-1] == 1024 and sizes == sorted(set(sizes))
    for below, size in itertools.pairwise(sizes):
        assert size - below <= 8 or (size - below) / below <= 1 / 8


def test_graphs_are_captured_largest_first_and_looked_up_by_next_size() -> None:
    captured: list[int] = []
    graphs: DecodeGraphs[int] = DecodeGraphs(20, lambda size: captured.append(size) or size)
    assert graphs.find(3) is None
    while graphs.num_missing:
        graphs.capture_one()
        if captured[-1] == 8:
            assert graphs.find(3) == 8
            assert graphs.find(2) is None
    assert captured == [20, 16, 8, 4, 2, 1]
    assert graphs.find(3) == 4
    assert graphs.find(20) == 20
    assert graphs.find(21) is None


def test_smaller_graphs_remain_if_a_capture_runs_out_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    def capture(size: int) -> int:
        if size < 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return size

    graphs = DecodeGraphs(20, capture)
    with caplog.at_level(logging.WARNING, "quintet"):
        while graphs.num_missing:
            graphs.capture_one()
    assert graphs.find(17) == 20
    assert graphs.find(16) == 16
    assert graphs.find(8) == 16  # one size up
    assert graphs.find(4) is None
    assert "1, 2, 4, 8 rows" in caplog.text and "--gpu-memory-utilization" in caplog.text


def test_memory_of_other_processes_reduces_the_share() -> None:
    gib = 1 << 30
    alone = kv_bytes(80 * gib, 60 * gib, 0.9, gib)
    assert alone == 72 * gib - 20 * gib - gib
    assert kv_bytes(80 * gib, 50 * gib, 0.9, gib) == alone - 10 * gib
    assert kv_bytes(80 * gib, 5 * gib, 0.9, gib) < 0
    assert graph_bytes(256, 128256, 28672, 2, 4) == (256 << 20) + 256 * (4 * 2 * 128256 + 2 * 8 * 28672)
