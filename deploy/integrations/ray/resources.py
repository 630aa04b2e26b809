"""Whether a Ray cluster has room for hosts, and what each asks of its node. Knows no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Node:
    """One of the cluster that lives."""

    node_id: str
    address: str
    cpus: int
    """Those that Ray counts, whoever has them just now."""


def processors_of(
    nodes: Sequence[Node], own_id: str, count: int, ranks_per_host: int, threads: int
) -> list[int]:
    """Return how many CPUs each host takes, this node's first. Raises `ConfigError` where there are too few, or too few nodes.

    threads: of each rank; 0: a host takes its node whole, and none more than the smallest of the others that are needed has.
    Of a node that Ray was told to count no CPUs of none are taken, if the first host is there.
    """
    there = ", ".join(f"{node.address} ({node.cpus} CPUs)" for node in nodes)
    if len(nodes) < count:
        raise ConfigError(
            f"--nnodes {count}: each host has a node of the Ray cluster to itself, and there are {len(nodes)}: {there}; start"
            " more (ray start --address …), or lower --nnodes"
        )
    [own] = (node for node in nodes if node.node_id == own_id)
    others = sorted((node.cpus for node in nodes if node is not own), reverse=True)[: count - 1]
    asked = ranks_per_host * max(1, threads)
    if others[-1] < asked or 0 < own.cpus < asked:
        raise ConfigError(
            f"each of {count} hosts has {ranks_per_host} rank{'s' * (ranks_per_host > 1)} and takes {asked}"
            f" CPU{'s' * (asked > 1)} of its node, one for each thread, this node among them, and the Ray cluster has: {there};"
            " lower --threads, or add nodes that have as many"
        )
    if threads:
        return [asked if own.cpus else 0, *(asked for _ in others)]
    return [own.cpus, *(others[-1] for _ in others)]
