"""Lifetimes of captured graphs, against a model of torch's allocator: pools count the graphs that use them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.executor.backends.cuda.graph_capture import GraphCapture


class FakeStream:
    """A stream; `workspace` is the pool that cuBLAS's workspace of this stream was allocated from."""

    workspace: object | None = None

    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeCuda:
    """The part of ``torch.cuda`` that captures use. Raises the error of torch 2.11 for a pool without users."""

    def __init__(self) -> None:
        self.default = FakeStream()
        self.stream_now = self.default
        self.pool_now: object | None = None
        self.users: dict[object, int] = {}
        """Live graphs by pool."""
        cuda = self

        class Graph:
            pool: object | None = None
            stream: FakeStream | None = None

            def replay(self) -> None:
                assert self.stream is not None and self.stream.workspace is not None, "workspace was freed"

            def __del__(self) -> None:
                if self.pool is not None:
                    cuda.users[self.pool] -= 1
                if self.stream is not None:
                    self.stream.workspace = None  # as torch 2.12 does

        self.CUDAGraph = Graph

    def graph_pool_handle(self) -> object:
        return object()

    def Stream(self) -> FakeStream:
        return FakeStream()

    def current_stream(self) -> FakeStream:
        return self.stream_now

    def synchronize(self) -> None:
        pass

    def set_stream(self, stream: FakeStream) -> None:
        self.stream_now = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    @contextmanager
    def graph(
        self, graph: Any, *, stream: FakeStream, capture_error_mode: str, pool: object | None = None
    ) -> Iterator[None]:
        pool = object() if pool is None else pool
        if self.users.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.users[pool] = self.users.get(pool, 0) + 1
        graph.pool, graph.stream, self.pool_now = pool, stream, pool
        with self.stream(stream):
            try:
                yield
            finally:
                self.pool_now = None

    def product(self) -> None:
        """Allocate the stream's workspace where there is none, as ``torch.mm`` does."""
        if self.stream_now.workspace is None:
            self.stream_now.workspace = self.pool_now or "outside of all pools"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in (
        "CUDAGraph",
        "Stream",
        "current_stream",
        "graph",
        "graph_pool_handle",
        "set_stream",
        "stream",
        "synchronize",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch, "zeros", lambda *size, **where: SimpleNamespace())
    return fake


def test_step_graphs_are_captured_after_others_were_dropped(cuda: FakeCuda) -> None:
    graphs = GraphCapture()
    for _ in range(3):
        replay = graphs.step_graph(cuda.product)
        replay()
        del replay
        gc.collect()


def test_timing_graphs_keep_the_workspace_of_step_graphs(cuda: FakeCuda) -> None:
    graphs = GraphCapture()
    replay = graphs.step_graph(cuda.product)
    for _ in range(3):
        graphs.timing_graph(cuda.product)()
        gc.collect()
        replay()


def test_timing_graph_allocates_its_workspace_outside_its_pool(cuda: FakeCuda) -> None:
    replay = GraphCapture().timing_graph(cuda.product)
    graph = replay.__self__  # type: ignore[attr-defined]
    assert graph.stream.workspace == "outside of all pools"


def test_failed_capture_keeps_the_workspace_of_step_graphs(cuda: FakeCuda) -> None:
    graphs = GraphCapture()
    replay = graphs.step_graph(cuda.product)

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        graphs.step_graph(fail)
    gc.collect()
    replay()
    graphs.step_graph(cuda.product)()
