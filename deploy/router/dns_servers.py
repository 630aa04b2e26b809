"""Servers behind a name of the network: every address that a lookup gives, as of a headless service of Kubernetes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from quintet.deploy.tools.load_client.connection import BadUrl, Target
from quintet.wire.errors import ConfigError

_log = logging.getLogger("quintet")

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a host and a port to addresses. Raises `OSError`."""


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """Ask the system's resolver, in a thread of its own."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, family=socket.AF_UNSPEC, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsServers:
    """What was found last behind each name. A lookup that fails changes nothing: a resolver that is ill ends no server."""

    def __init__(self, urls: Sequence[str], look_up: LookUp = addresses_of) -> None:
        """Raise `ConfigError` for a URL that cannot stand for several addresses."""
        self._targets = [_for_names(url) for url in urls]
        self._look_up = look_up
        self._found: dict[Target, list[str]] = {}
        self._trouble: dict[Target, str] = {}

    @property
    def urls(self) -> list[str]:
        """Of all servers found."""
        return [url for target in self._targets for url in self._found.get(target, ())]

    async def follow(self) -> bool:
        """Look all names up again; return whether the servers are others now."""
        before = self.urls
        for target in self._targets:
            try:
                addresses = await self._look_up(target.host, target.port)
            except (OSError, ValueError) as error:  # ValueError: of a name that is none
                self._complain(target, str(error))
            else:
                self._complain(target, "")
                self._found[target] = [_url(target, address) for address in sorted(set(addresses))]
        return self.urls != before

    def _complain(self, target: Target, trouble: str) -> None:
        """Say what is new."""
        if trouble and trouble != self._trouble.get(target):
            _log.warning(
                "--engine-dns %s cannot be looked up (%s); its servers stay as they are", target.host, trouble
            )
        self._trouble[target] = trouble


def parsed(url: str) -> Target:
    """Read the address of a server. Raises `ConfigError`."""
    try:
        target = Target.parse(url)
        target.host.encode("idna")
    except BadUrl as error:
        raise ConfigError(str(error)) from None
    except UnicodeError as error:
        raise ConfigError(
            f"{url!r} is no address of a server: its host cannot be the name of one ({error}); write an address or a name, as in "
            "http://127.0.0.1:8000"
        ) from None
    return target


def _for_names(url: str) -> Target:
    try:
        target = parsed(url)
    except ConfigError as error:
        raise ConfigError(f"--engine-dns: {error}") from None
    if target.tls:
        raise ConfigError(
            f"--engine-dns is {url}; it must be http: certificates are of names, and servers are reached by address"
        )
    return target


def _url(target: Target, address: str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{target.port}{target.prefix}"
