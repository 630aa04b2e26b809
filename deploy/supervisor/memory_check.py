"""Whether there is memory for more engines than a server began with: each has weights and KV memory of its own."""

from __future__ import annotations

from quintet.deploy.config.memory import ATTENTION_SCRATCH_BYTES, format_size
from quintet.deploy.supervisor.commands import CommandError
from quintet.wire.config import EngineConfig


def check_room(config: EngineConfig, num_more: int, available_bytes: int) -> None:
    """Raise `CommandError` where so many more engines would take more host memory than there is.

    The kernel gives memory when it is first written: KV memory that the engines there have not used yet counts as free.
    """
    if num_more <= 0 or config.executor.kind == "mock" or config.executor.device != "cpu":
        return
    if config.executor.hosts is not None:
        raise CommandError("an engine on several hosts has no others beside it: start another group of hosts")
    num_ranks, kv_memories = config.executor.num_ranks, config.executor.num_kv_memories
    weights, kv = config.executor.weight_bytes * num_ranks, config.cache.memory_bytes * kv_memories
    each = weights + kv + ATTENTION_SCRATCH_BYTES * num_ranks + config.executor.shared_bytes
    if num_more * each > available_bytes:
        needed, left = format_size(num_more * each), format_size(available_bytes)
        raise CommandError(
            f"{num_more} more engine{'s' * (num_more > 1)} would take {needed} (each {format_size(weights)} of weights and "
            f"{format_size(kv)} of KV) and there are {left} of memory: to grow later, start the server with a smaller "
            "--kv-cache-memory"
        )
