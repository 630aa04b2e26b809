"""CUDA graph capture: memory pool, stream and lifetime of each graph.

Step graphs share one memory pool and one stream and live as long as the device. Timing graphs are dropped after a measurement:
each has its own pool, and they share another stream.

Reasons, all of torch's caching allocator:

* A pool without live graphs cannot be captured into again while cuBLAS's workspace of the capture stream still lies in
  it (`use_count > 0 INTERNAL ASSERT FAILED`, torch 2.11; vLLM issue 28426). An anchor graph keeps the step pool in use.
* Destroying a graph frees the cuBLAS workspace of its capture stream, which live graphs of that stream still address
  (torch 2.12; pytorch issue 193402). No step graph is destroyed, failed captures included.
* cuBLAS allocates its workspace at the first product on a stream. Timing graphs run once on their stream before capture,
  so that the workspace is not allocated from a pool that dies with the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ERROR_MODE = "thread_local"
"""A thread that waits for events must not invalidate the capture of the launching thread."""


class GraphCapture:
    """Captures on the current CUDA device; owns the step pool, both streams and every step graph."""

    def __init__(self) -> None:
        self._step_pool = torch.cuda.graph_pool_handle()
        self._step_stream = torch.cuda.Stream()
        self._timing_stream = torch.cuda.Stream()
        self._step_graphs: list[torch.cuda.CUDAGraph] = []

    def step_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture ``run`` into the step pool; return the function that replays it. The graph is never destroyed."""
        if not self._step_graphs:
            self._capture_step(_allocate_one)  # the anchor
        return self._capture_step(run).replay

    def timing_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run ``run`` once, then capture it into a separate pool. The graph is destroyed with the returned function."""
        self._timing_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._timing_stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            _stream_restored(),
            torch.cuda.graph(graph, stream=self._timing_stream, capture_error_mode=ERROR_MODE),
        ):
            run()
        return graph.replay

    def _capture_step(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._step_graphs.append(graph)
        with (
            _stream_restored(),
            torch.cuda.graph(
                graph, pool=self._step_pool, stream=self._step_stream, capture_error_mode=ERROR_MODE
            ),
        ):
            run()
        return graph


@contextmanager
def _stream_restored() -> Iterator[None]:
    """Restore the current stream: a capture that fails to end leaves its own stream current (torch 2.11)."""
    previous = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(previous)


def _allocate_one() -> None:
    torch.zeros(1, device="cuda")
