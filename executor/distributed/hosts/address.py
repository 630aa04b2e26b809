"""What the first host's address stands for: one name may be several addresses, of both kinds, and another tomorrow."""

from __future__ import annotations

import socket


def endpoints_of(address: str) -> list[str]:
    """Return the ZeroMQ endpoints of an address ``HOST:PORT``, those of IPv4 first. Raises `OSError` where the name is unknown.

    Both sides try them in this order, so that they meet where there are several.
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
    """Return whether ZeroMQ must be told that an endpoint is of IPv6."""
    return endpoint.startswith("tcp://[")
