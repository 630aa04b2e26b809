"""Resolve the first host's address: a name may have several addresses, IPv4 and IPv6, that change over time."""

from __future__ import annotations

import socket


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
