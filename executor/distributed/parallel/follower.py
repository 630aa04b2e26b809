"""The process of a follower: ``python -m quintet.executor.distributed.parallel.follower``, started by the leader.

It has no slot and no sockets. It keeps weights and KV memory but no request state. It exits with the leader from its
start on, even while torch is being imported.
"""

from __future__ import annotations

from quintet.executor.backends.platforms.shares import take_share
from quintet.executor.backends.registry import run_follower
from quintet.executor.distributed.parallel.follower_processes import ChildIdentity, run_child
from quintet.process.spans import TraceSpan, no_span
from quintet.process.trace import Tracer
from quintet.wire.config import EngineConfig


def _run(slot: ChildIdentity, config: EngineConfig) -> None:
    span = _span_of(slot, config)
    config = take_share(slot.me.index, config, slot.rank)
    run_follower(config, span, slot.memory, slot.rank)


def _span_of(slot: ChildIdentity, config: EngineConfig) -> TraceSpan:
    if config.trace is None:
        return no_span
    stage, rank = divmod(slot.rank, config.executor.tensor_parallel_size)
    tracer = Tracer(slot.me, config.trace, part=f"rank {slot.rank}" if rank else f"stage {stage}")
    tracer.write_in_thread()
    return tracer.span


if __name__ == "__main__":
    run_child("rank", _run)
