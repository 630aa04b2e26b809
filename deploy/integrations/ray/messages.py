"""What the first host and its driver say to each other: lines of JSON, over pipes that nobody else has."""

from __future__ import annotations

import msgspec


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be placed. It has the key, so it is no argument of a command."""

    count: int
    """Hosts, the first among them."""
    ranks_per_host: int
    threads: int
    """Of each rank; 0 where a host takes its node whole."""
    address: str
    """Where the first host listens: ``--master-addr``."""
    key: bytes
    flags: dict[str, str | int | bool]
    """Those that the other hosts have in common."""
    log_level: str


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The driver is of the cluster, and waits for the order."""

    address: str
    """This node's, as the others know it."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What was ordered cannot be."""

    words: str


Report = Joined | Refused
