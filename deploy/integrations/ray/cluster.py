"""Cluster of a Ray placement: CPU allocation on its nodes, and messages of its driver. Does not import Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quintet.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    address: str
    cpus: int
    """Total CPUs of the node in Ray, used ones included."""


def processors_of(
    nodes: Sequence[Node], own_id: str, count: int, ranks_per_host: int, threads: int
) -> list[int]:
    """Return the CPUs of each host, this node's first. Raises `ConfigError` for too few CPUs or nodes.

    threads: per rank; 0: a host uses its whole node, limited to the smallest of the other used nodes.
    Host 0 takes no CPUs of a node that Ray counts without CPUs.
    """
    available = ", ".join(f"{node.address} ({node.cpus} CPUs)" for node in nodes)
    if len(nodes) < count:
        raise ConfigError(
            f"--nnodes {count}: each host needs its own Ray node, but the cluster has {len(nodes)}: {available}; add"
            " nodes (ray start --address …), or lower --nnodes"
        )
    [own] = (node for node in nodes if node.node_id == own_id)
    others = sorted((node.cpus for node in nodes if node is not own), reverse=True)[: count - 1]
    needed = ranks_per_host * max(1, threads)
    if others[-1] < needed or 0 < own.cpus < needed:
        raise ConfigError(
            f"each of {count} hosts has {ranks_per_host} rank{'s' * (ranks_per_host > 1)} and needs {needed}"
            f" CPU{'s' * (needed > 1)} of its node, one per thread, but the Ray cluster has: {available}; lower --threads, or"
            " add larger nodes"
        )
    if threads:
        return [needed if own.cpus else 0, *(needed for _ in others)]
    return [own.cpus, *(others[-1] for _ in others)]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Placement order. Contains the group key, so it is not a command-line argument."""

    count: int
    """Number of hosts, host 0 included."""
    ranks_per_host: int
    threads: int
    """Threads per rank; 0: a host uses its whole node."""
    address: str
    """Address of host 0: ``--master-addr``."""
    key: bytes
    flags: dict[str, str | int | bool]
    """Common flags of the other hosts."""
    log_level: str


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The driver is connected to the cluster, and waits for the order."""

    address: str
    """Ray address of this node."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The order cannot be fulfilled."""

    words: str


Report = Joined | Refused
