"""Memory check before engines are added: each engine has its own weights and KV memory."""

from __future__ import annotations

from quintet.deploy.config.memory import ATTENTION_SCRATCH_BYTES, format_size
from quintet.deploy.supervisor.commands import CommandError
from quintet.wire.config import EngineConfig


def check_memory(config: EngineConfig, num_more: int, available_bytes: int) -> None:
    """Raise `CommandError` if ``num_more`` engines need more host memory than ``available_bytes``.

    The kernel allocates pages on first write, so unused KV memory of running engines counts as free.
    """
    if num_more <= 0 or config.executor.kind == "mock" or config.executor.device != "cpu":
        return
    if config.executor.hosts is not None:
        raise CommandError("a multi-host engine cannot be scaled: start another group of hosts")
    num_ranks, kv_memories = config.executor.num_ranks, config.executor.num_kv_memories
    weights, kv = config.executor.weight_bytes * num_ranks, config.cache.memory_bytes * kv_memories
    each = weights + kv + ATTENTION_SCRATCH_BYTES * num_ranks + config.executor.shared_bytes
    if num_more * each > available_bytes:
        needed, left = format_size(num_more * each), format_size(available_bytes)
        raise CommandError(
            f"{num_more} more engine{'s' * (num_more > 1)} would take {needed} (each {format_size(weights)} of weights and "
            f"{format_size(kv)} of KV), but {left} of memory are available: to scale later, start the server with a "
            "smaller --kv-cache-memory"
        )
