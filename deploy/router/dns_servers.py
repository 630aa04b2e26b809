"""Service discovery by DNS: one server per address of a name, such as a headless service of Kubernetes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from quintet.deploy.http_client.connection import BadUrl, Target
from quintet.wire.errors import ConfigError

_log = logging.getLogger("quintet")

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolver: host and port to addresses. Raises `OSError`."""


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """Resolve with the system's resolver, in a worker thread."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, family=socket.AF_UNSPEC, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsServers:
    """Last known addresses of each name. A failed lookup keeps them, so a broken resolver removes no server."""

    def __init__(self, urls: Sequence[str], look_up: LookUp = addresses_of) -> None:
        """Raise `ConfigError` for an unsupported URL."""
        self._targets = [_for_names(url) for url in urls]
        self._look_up = look_up
        self._found: dict[Target, list[str]] = {}
        self._trouble: dict[Target, str] = {}

    @property
    def urls(self) -> list[str]:
        """URLs of all known servers."""
        return [url for target in self._targets for url in self._found.get(target, ())]

    async def follow(self) -> bool:
        """Look up all names again; return whether the servers changed."""
        before = self.urls
        for target in self._targets:
            try:
                addresses = await self._look_up(target.host, target.port)
            except (OSError, ValueError) as error:  # ValueError: an invalid name
                self._log_trouble(target, str(error))
            else:
                self._log_trouble(target, "")
                self._found[target] = [_url(target, address) for address in sorted(set(addresses))]
        return self.urls != before

    def _log_trouble(self, target: Target, trouble: str) -> None:
        """Log a new error of a lookup."""
        if trouble and trouble != self._trouble.get(target):
            _log.warning(
                "--engine-dns %s: lookup failed (%s); its known servers are kept", target.host, trouble
            )
        self._trouble[target] = trouble


def parsed(url: str) -> Target:
    """Parse the URL of a server. Raises `ConfigError`."""
    try:
        target = Target.parse(url)
        target.host.encode("idna")
    except BadUrl as error:
        raise ConfigError(str(error)) from None
    except UnicodeError as error:
        raise ConfigError(
            f"{url!r} is not a URL of a server: its host name is invalid ({error}); use an address or a name, as in "
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
            f"--engine-dns is {url}; it must be http: certificates have names, but servers are reached by address"
        )
    return target


def _url(target: Target, address: str) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{target.port}{target.prefix}"
