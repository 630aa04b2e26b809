"""Distribution of ranks over hosts, and the links between hosts.

    host 0    stage 0 ── stage 1 ─╮               each host has the same number of consecutive stages;
                  ▲               ▼ link 1        link k connects stage k to the next, the last one to the first
    host 1    link 3 ── stage 3 ── stage 2

With one stage, each host has the same number of consecutive ranks; link h connects the leader to the ranks of host h.
"""

from __future__ import annotations

from quintet.wire.config import ExecutorConfig


def ranks_of(executor: ExecutorConfig, host: int) -> range:
    """Return the ranks that run on a host."""
    return range(host * executor.ranks_per_host, (host + 1) * executor.ranks_per_host)


def spans_hosts(executor: ExecutorConfig) -> bool:
    """Return whether the ranks of a single stage are on several hosts."""
    return executor.pipeline_parallel_size == 1 and executor.num_hosts > 1


def sender_host(executor: ExecutorConfig, link: int) -> int:
    """Return the host of a link's sender."""
    if spans_hosts(executor):
        return 0
    return link * executor.num_hosts // executor.pipeline_parallel_size


def receiver_host(executor: ExecutorConfig, link: int) -> int:
    """Return the host of a link's receiver."""
    if spans_hosts(executor):
        return link
    return sender_host(executor, (link + 1) % executor.pipeline_parallel_size)


def links_between(executor: ExecutorConfig) -> list[int]:
    """Return the links between different hosts."""
    if spans_hosts(executor):
        return list(range(1, executor.num_hosts))
    links = range(executor.pipeline_parallel_size)
    return [link for link in links if sender_host(executor, link) != receiver_host(executor, link)]
