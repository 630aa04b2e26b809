"""Distribution of ranks over hosts, the links between hosts, and the first host's address.

    host 0    stage 0 ── stage 1 ─╮               each host has the same number of consecutive stages;
                  ▲               ▼ link 1        link k connects stage k to the next, the last one to the first
    host 1    link 3 ── stage 3 ── stage 2

With one stage, each host has the same number of consecutive ranks; link h connects the leader to the ranks of host h.

A name may have several addresses, IPv4 and IPv6, that change over time.
"""

from __future__ import annotations

import socket

from quintet.wire.config import ExecutorConfig


def ranks_of(executor: ExecutorConfig, host: int) -> range:
    return range(host * executor.ranks_per_host, (host + 1) * executor.ranks_per_host)


def spans_hosts(executor: ExecutorConfig) -> bool:
    """Return whether the ranks of a single stage are on several hosts."""
    return executor.pipeline_parallel_size == 1 and executor.num_hosts > 1


def sender_host(executor: ExecutorConfig, link: int) -> int:
    if spans_hosts(executor):
        return 0
    return link * executor.num_hosts // executor.pipeline_parallel_size


def receiver_host(executor: ExecutorConfig, link: int) -> int:
    if spans_hosts(executor):
        return link
    return sender_host(executor, (link + 1) % executor.pipeline_parallel_size)


def links_between(executor: ExecutorConfig) -> list[int]:
    """Return the links between different hosts."""
    if spans_hosts(executor):
        return list(range(1, executor.num_hosts))
    links = range(executor.pipeline_parallel_size)
    return [link for link in links if sender_host(executor, link) != receiver_host(executor, link)]


def endpoints_of(address: str) -> list[str]:
    """Return the ZeroMQ endpoints of an address ``HOST:PORT``, IPv4 first. Raises `OSError` for an unknown name.

    All hosts try them in this order, so that they use the same one.
    """
    name, _, port = address.rpartition(":")
    found = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
    hosts = [
        f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])
        for family, _, _, _, place in sorted(found, key=lambda each: each[0] == socket.AF_INET6)
        if family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [f"tcp://{host}:{port}" for host in dict.fromkeys(hosts)]


def is_ipv6(endpoint: str) -> bool:
    """Return whether an endpoint needs ZeroMQ's IPv6 option."""
    return endpoint.startswith("tcp://[")
