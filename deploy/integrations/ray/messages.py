"""Messages between host 0 and its Ray driver: JSON lines over private pipes."""

from __future__ import annotations

import msgspec


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
