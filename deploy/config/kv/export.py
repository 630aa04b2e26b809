"""Conditions for KV transfer out of an executor: to disk (``--kv-disk``), a store (``--kv-store``) or peers (``--role``)."""

from __future__ import annotations

from quintet.deploy.config.flags import Options
from quintet.wire.errors import ConfigError


def check_kv_leaves(flag: str, options: Options, device: str, has_prefix_cache: bool) -> None:
    """Raise `ConfigError` if the executor cannot export KV blocks, as ``flag`` requires."""
    if options.executor == "mock":
        raise ConfigError(f"{flag}: the mock executor has no KV cache; drop the flag")
    if device != "cpu":
        raise ConfigError(f"{flag} is supported on CPUs only: drop it, or set --device cpu")
    if options.nnodes > 1:
        raise ConfigError(
            f"{flag} is not supported with several hosts (--nnodes {options.nnodes}): drop one of the two"
        )
    if not has_prefix_cache:
        raise ConfigError(
            f"{flag} requires prefix caching, which is disabled (by --no-enable-prefix-caching, or because the model's RoPE"
            " depends on sequence length): drop one of the two"
        )


def kv_leaves(options: Options) -> bool:
    """Return whether a flag enables KV export."""
    return options.kv_disk is not None or options.kv_store is not None or options.role != "none"


def num_parts(options: Options) -> int:
    """Return the number of KV memories that each hold a part of every block; configured sizes are per KV memory."""
    return options.tensor_parallel_size // options.decode_context_parallel_size
