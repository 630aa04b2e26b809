"""Whether blocks of KV can leave an executor: for a disk (``--kv-disk``), or for other servers (``--role``)."""

from __future__ import annotations

from quintet.deploy.resolve.flags import Options
from quintet.wire.errors import ConfigError


def check_kv_leaves(flag: str, options: Options, device: str, shares_beginnings: bool) -> None:
    """Refuse ``flag`` where blocks cannot leave: raises `ConfigError`. shares_beginnings: whether the prefix cache is on."""
    if options.executor == "mock":
        raise ConfigError(f"{flag} is for a model's KV, and the mock executor has none: drop it")
    if device != "cpu":
        raise ConfigError(
            f"{flag}: KV leaves the executor from host memory so far, not from a GPU: drop it, or give --device cpu"
        )
    for cutting, size in (
        ("--tensor-parallel-size", options.tensor_parallel_size),
        ("--pipeline-parallel-size", options.pipeline_parallel_size),
    ):
        if size > 1:
            raise ConfigError(
                f"{flag}: the blocks of {cutting} {size} lie in several processes, and leave from one so far: drop one of the two"
            )
    if not shares_beginnings:
        raise ConfigError(
            f"{flag}: blocks are found by the prefix cache's keys, and prefix caching is off (--no-enable-prefix-caching, or a"
            " model that rotates long sequences otherwise): drop one of the two"
        )
