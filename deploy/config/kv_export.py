"""Whether blocks of KV can leave an executor: for a disk (``--kv-disk``), or for other servers (``--role``)."""

from __future__ import annotations

from quintet.deploy.config.flags import Options
from quintet.wire.errors import ConfigError


def check_kv_leaves(flag: str, options: Options, device: str, shares_beginnings: bool) -> None:
    """Refuse ``flag`` where blocks cannot leave: raises `ConfigError`. shares_beginnings: whether the prefix cache is on."""
    if options.executor == "mock":
        raise ConfigError(f"{flag} is for a model's KV, and the mock executor has none: drop it")
    if device != "cpu":
        raise ConfigError(
            f"{flag}: KV leaves the executor from host memory so far, not from a GPU: drop it, or give --device cpu"
        )
    if options.nnodes > 1:
        raise ConfigError(
            f"{flag}: the blocks of --nnodes {options.nnodes} lie on several hosts, and leave from one so far: drop"
            " one of the two"
        )
    if not shares_beginnings:
        raise ConfigError(
            f"{flag}: blocks are found by the prefix cache's keys, and prefix caching is off (--no-enable-prefix-caching, or a"
            " model that rotates long sequences otherwise): drop one of the two"
        )


def kv_leaves(options: Options) -> bool:
    """Return whether that is asked for."""
    return options.kv_disk is not None or options.kv_store is not None or options.role != "none"


def num_parts(options: Options) -> int:
    """Return in how many KV memories each block has a part: sizes are of one of them, as that of KV memory is."""
    return options.tensor_parallel_size // options.decode_context_parallel_size
