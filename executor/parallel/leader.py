"""The worker of rank 0, which has the other ranks compute with it."""

from __future__ import annotations

from quintet.executor.parallel.boot import open_ranks
from quintet.executor.parallel.followers import Followers
from quintet.executor.worker import Worker, make_torch_worker
from quintet.process.trace import Span
from quintet.wire.config import EngineConfig


def make_leading_worker(config: EngineConfig, span: Span, followers: Followers) -> Worker:
    """Load rank 0's share while the others load theirs; return when all are there."""
    ranks = open_ranks(config, followers.descriptor, 0)
    worker = make_torch_worker(config, span, ranks)
    ranks.wait_for_all()
    worker.facts["ranks"] = str(config.executor.tensor_parallel_size)
    return worker
