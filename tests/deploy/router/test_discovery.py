"""Service discovery by DNS: added and removed servers, and a resolver that does not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from quintet.deploy.router.servers import Servers
from quintet.deploy.router.watch import DnsServers, Pulse, Watch
from quintet.wire.errors import ConfigError

URL = "http://pods.example:8000/prefix"


class Resolver:
    """Resolver with the addresses that the test sets."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] | Exception = ()
        self.lookups: list[tuple[str, int]] = []

    async def look_up(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append((host, port))
        if isinstance(self.addresses, Exception):
            raise self.addresses
        return self.addresses


def test_every_address_is_a_server_and_failed_lookup_changes_nothing() -> None:
    async def scenario() -> None:
        resolver = Resolver()
        names = DnsServers([URL], resolver.look_up)
        resolver.addresses = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
        assert await names.follow()
        both = [f"http://{host}:8000/prefix" for host in ("10.0.0.1", "10.0.0.2")]
        assert names.urls == [*both, "http://[fd00::1]:8000/prefix"]
        resolver.addresses = UnicodeError("label empty or too long")
        assert not await names.follow()
        resolver.addresses = socket.gaierror(socket.EAI_AGAIN, "try again")
        assert not await names.follow()
        resolver.addresses = ["10.0.0.2"]
        assert await names.follow()
        assert names.urls == both[1:]
        assert not await names.follow()
        assert set(resolver.lookups) == {("pods.example", 8000)}

    asyncio.run(scenario())


def test_system_resolver_is_used() -> None:
    async def scenario() -> None:
        names = DnsServers(["http://localhost:8000"])
        await names.follow()
        assert {"http://127.0.0.1:8000", "http://[::1]:8000"} & set(names.urls)

    asyncio.run(scenario())


def test_watch_adds_and_removes_servers() -> None:
    async def scenario() -> None:
        resolver = Resolver()
        servers = Servers("load")
        watch = Watch(servers, [], None, Pulse(0.01, 5, 5, "", 0.5), DnsServers([URL], resolver.look_up))
        task = asyncio.get_running_loop().create_task(watch.run())

        async def set_addresses(*hosts: str) -> None:
            while [server.url for server in servers] != [f"http://{host}:8000/prefix" for host in hosts]:
                await asyncio.sleep(0.01)

        resolver.addresses = ["127.0.0.2", "127.0.0.3"]
        await set_addresses("127.0.0.2", "127.0.0.3")
        resolver.addresses = ["127.0.0.3"]
        await set_addresses("127.0.0.3")
        task.cancel()
        for server in servers:
            server.pool.close_connections()

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("https://pods:8000", "it must be http"),
        ("ftp://pods", "--engine-dns: 'ftp://pods' is not a server URL; it must have the form"),
        ("http://10.0.0..5:8000", "its host name is invalid"),
    ],
)
def test_invalid_discovery_url_is_rejected(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        DnsServers([url])
