"""The process of a rank that is not the first: ``python -m quintet.executor.distributed.parallel.follower``, started by rank 0.

Has no slot, no sockets, and nothing to lose: between two orders it keeps weights and KV memory, and nobody's requests. Ends with
rank 0 from its first line on, while torch is being imported too.
"""

from __future__ import annotations

import argparse
import importlib

from quintet.executor.backends.platforms.shares import take_share
from quintet.executor.distributed.parallel.child import ChildIdentity, be_child, numbers
from quintet.process.trace import Span, Tracer, no_span
from quintet.wire.config import EngineConfig

FOLLOWING = {
    "cpu": "quintet.executor.distributed.parallel.follower_loop",
    "cuda": "quintet.executor.backends.cuda.follower",
}
"""Where the work is, by ``ExecutorConfig.device``: imported once this process has a name and a parent, since torch comes
with it."""


def _follow(slot: ChildIdentity, config: EngineConfig, arguments: argparse.Namespace) -> None:
    span = _span_of(slot, config)
    config = take_share(slot.me.index, config, slot.rank)
    descriptors = (numbers(arguments.groups), numbers(arguments.links), numbers(arguments.crossings))
    importlib.import_module(FOLLOWING[config.executor.device]).follow_for_ever(
        config, *descriptors, slot.rank, span
    )


def _span_of(slot: ChildIdentity, config: EngineConfig) -> Span:
    if config.trace is None:
        return no_span
    stage, rank = divmod(slot.rank, config.executor.tensor_parallel_size)
    tracer = Tracer(slot.me, config.trace, part=f"rank {slot.rank}" if rank else f"stage {stage}")
    tracer.write_beside()
    return tracer.span


if __name__ == "__main__":
    be_child("rank", _follow)
