"""The process of a follower: ``python -m quintet.executor.distributed.parallel.follower``, started by the leader.

It has no slot and no sockets. It keeps weights and KV memory but no request state. It exits with the leader from its
start on, even while torch is being imported.
"""

from __future__ import annotations

import argparse
import importlib

from quintet.executor.backends.platforms.shares import take_share
from quintet.executor.distributed.parallel.child import ChildIdentity, parse_ints, run_child
from quintet.process.trace import Span, Tracer, no_span
from quintet.wire.config import EngineConfig

FOLLOWER_MODULES = {
    "cpu": "quintet.executor.distributed.parallel.follower_loop",
    "cuda": "quintet.executor.backends.cuda.ranks.follower",
}
"""Module of the follower loop by ``ExecutorConfig.device``, imported after start-up because it imports torch."""


def _run(slot: ChildIdentity, config: EngineConfig, arguments: argparse.Namespace) -> None:
    span = _span_of(slot, config)
    config = take_share(slot.me.index, config, slot.rank)
    descriptors = (
        parse_ints(arguments.groups),
        parse_ints(arguments.links),
        parse_ints(arguments.gather_fds),
    )
    importlib.import_module(FOLLOWER_MODULES[config.executor.device]).run_follower(
        config, *descriptors, slot.rank, span
    )


def _span_of(slot: ChildIdentity, config: EngineConfig) -> Span:
    if config.trace is None:
        return no_span
    stage, rank = divmod(slot.rank, config.executor.tensor_parallel_size)
    tracer = Tracer(slot.me, config.trace, part=f"rank {slot.rank}" if rank else f"stage {stage}")
    tracer.write_in_thread()
    return tracer.span


if __name__ == "__main__":
    run_child("rank", _run)
