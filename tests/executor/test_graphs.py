"""Graph sizes and KV memory, computed without a device."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from quintet.executor.backends.cuda.graphs import DecodeGraphs, GraphSize, graph_sizes, padded_sizes
from quintet.executor.backends.cuda.kv_memory import graph_bytes, kv_bytes
from quintet.wire.config import SchedulerConfig, SpeculativeConfig


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

    def capture(size: GraphSize) -> int:
        captured.append(size.num_tokens)
        return size.num_tokens

    graphs = DecodeGraphs(
        graph_sizes(SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=64), 20), capture
    )
    assert graphs.find(GraphSize(3, 1)) is None
    while graphs.num_missing:
        graphs.capture_one()
        if captured[-1] == 8:
            assert graphs.find(GraphSize(3, 1)) == 8
            assert graphs.find(GraphSize(2, 1)) is None
    assert captured == [20, 16, 8, 4, 2, 1]
    assert graphs.find(GraphSize(3, 1)) == 4
    assert graphs.find(GraphSize(20, 1)) == 20
    assert graphs.find(GraphSize(21, 1)) is None
    assert graphs.has_size(GraphSize(20, 1)) and not graphs.has_size(GraphSize(21, 1))
    assert not graphs.has_size(GraphSize(8, 2)), "rows of two tokens have no graph without drafts"


def test_steps_with_drafts_have_graphs_of_their_own() -> None:
    scheduler = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, speculative=SpeculativeConfig(num_speculative_tokens=2)
    )
    sizes = graph_sizes(scheduler, 64)
    graphs = DecodeGraphs(sizes, lambda size: size)
    assert sizes[-1] == GraphSize(12, 3), "the largest, for the memory of graphs"
    while graphs.num_missing:
        graphs.capture_one()
    assert graphs.find(GraphSize(4, 1)) == GraphSize(4, 1)
    assert graphs.find(GraphSize(3, 2)) == GraphSize(4, 3)
    assert graphs.find(GraphSize(5, 3)) == GraphSize(8, 3)
    assert graphs.find(GraphSize(12, 3)) == GraphSize(12, 3), "4 rows of 3 tokens"
    assert not graphs.has_size(GraphSize(13, 3)) and not graphs.has_size(GraphSize(8, 4))


def test_smaller_graphs_remain_if_a_capture_runs_out_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    def capture(size: GraphSize) -> int:
        if size.num_tokens < 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return size.num_tokens

    graphs = DecodeGraphs(
        graph_sizes(SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=64), 20), capture
    )
    with caplog.at_level(logging.WARNING, "quintet"):
        while graphs.num_missing:
            graphs.capture_one()
    assert graphs.find(GraphSize(17, 1)) == 20
    assert graphs.find(GraphSize(16, 1)) == 16
    assert graphs.find(GraphSize(8, 1)) == 16  # one size up
    assert graphs.find(GraphSize(4, 1)) is None
    assert "1, 2, 4, 8 tokens" in caplog.text and "--gpu-memory-utilization" in caplog.text


def test_memory_of_other_processes_reduces_the_share() -> None:
    gib = 1 << 30
    alone = kv_bytes(80 * gib, 60 * gib, 0.9, gib)
    assert alone == 72 * gib - 20 * gib - gib
    assert kv_bytes(80 * gib, 50 * gib, 0.9, gib) == alone - 10 * gib
    assert kv_bytes(80 * gib, 5 * gib, 0.9, gib) < 0
    assert graph_bytes(256, 128256, 28672, 2, 4) == (256 << 20) + 256 * (4 * 2 * 128256 + 2 * 8 * 28672)
