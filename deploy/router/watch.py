"""Health checks by polling, and discovery of servers from a file or from DNS: one server per address of a name.

A server is usable if it is ready and makes progress. With work but without a computed token for some time it is stalled
and gets no requests. If neither polls nor streams receive anything, its connections are closed, and other servers resume
its streams.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quintet.deploy.http_client.connection import BadUrl, HttpAnswer, Target
from quintet.deploy.router.metrics import ServerMetrics, parse_metrics
from quintet.deploy.router.servers import Server, Servers
from quintet.deploy.router.upstream import Outgoing
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
                found = [replace(target, host=address) for address in sorted(set(addresses))]
                self._found[target] = [f"http://{each.authority}{each.prefix}" for each in found]
        return self.urls != before

    def _log_trouble(self, target: Target, trouble: str) -> None:
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


@dataclass(frozen=True, slots=True)
class Pulse:
    """Interval and timeouts of the polls."""

    every_s: float
    silent_s: float
    """Timeout without any received byte, after which a server's connections are closed."""
    stall_s: float
    """Timeout with work and without progress, after which a server is stalled."""
    key: str
    connect_s: float


class Watch:
    def __init__(
        self,
        servers: Servers,
        urls: Sequence[str],
        file: Path | None,
        pulse: Pulse,
        names: DnsServers | None = None,
        check: Callable[[str], object] = parsed,
    ) -> None:
        """Raise `ConfigError` for an invalid list; ``check`` raises it for an invalid URL."""
        self._check = check
        self._servers, self._urls, self._file, self._pulse = servers, urls, file, pulse
        self._names = names or DnsServers([])
        self._stamp: tuple[int, int] | None = None
        self._tasks: dict[Server, asyncio.Task[None]] = {}
        self._metrics_status: dict[Server, int] = {}
        """Last status of each server's `/metrics`."""
        if file is not None:
            self._stamp = _stamp_of(file)
        servers.set_urls(self._listed(), pulse.connect_s)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_names())
            group.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            self._follow_file()
            for server in self._servers:
                if server not in self._tasks:
                    self._tasks[server] = asyncio.get_running_loop().create_task(self._poll_server(server))
            for task in self._tasks.values():
                if task.done():
                    task.result()  # a finished poll task is a bug: stop the router instead of running without polls
            for server in self._servers.remove_idle():
                self._tasks.pop(server).cancel()
                self._metrics_status.pop(server, None)
                server.pool.close_connections()
                _log.info("%s: removed", server.url)
            await asyncio.sleep(self._pulse.every_s)

    def _listed(self) -> list[str]:
        urls = [
            *self._urls,
            *(read_list(self._file) if self._file is not None else ()),
            *self._names.urls,
        ]
        for url in urls:
            self._check(url)
        return list(dict.fromkeys(url.rstrip("/") for url in urls))

    def _follow_file(self) -> None:
        """Reload a changed file; an unreadable file changes nothing."""
        if self._file is None or (stamp := _stamp_of(self._file)) == self._stamp:
            return
        self._stamp = stamp
        self._reload()

    async def _follow_names(self) -> None:
        """Repeat the DNS lookups. A separate task, because a lookup may take seconds."""
        while True:
            if await self._names.follow():
                self._reload()
            await asyncio.sleep(self._pulse.every_s)

    def _reload(self) -> None:
        try:
            urls = self._listed()
        except ConfigError as error:
            _log.warning("%s; the server list is unchanged", error)
            return
        _log.info("servers: %s", ", ".join(urls) or "none")
        self._servers.set_urls(urls, self._pulse.connect_s)

    async def _poll_server(self, server: Server) -> None:
        last_s = progress_s = time.perf_counter()
        num_tokens: float | None = None  # no poll yet
        while True:
            began_s = time.perf_counter()
            before = set(server.holds)
            try:
                async with asyncio.timeout(max(self._pulse.every_s, self._pulse.connect_s)):
                    trouble, reading = await self._poll(server)
            except (OSError, TimeoutError, ValueError) as error:  # ValueError: an invalid answer
                silent_s = began_s - max(last_s, server.pool.last_received_s)
                if isinstance(error, TimeoutError) and silent_s < self._pulse.silent_s:
                    await asyncio.sleep(self._pulse.every_s)
                    continue
                server.set_trouble(f"no answer ({error or 'timeout'})")
                if silent_s >= self._pulse.silent_s:
                    server.pool.close_connections()
            else:
                last_s = time.perf_counter()
                if (
                    reading is None
                    or _has_progress(reading, num_tokens)
                    or server.pool.last_event_s > progress_s
                ):
                    progress_s = last_s
                if last_s - progress_s > self._pulse.stall_s:
                    trouble = (
                        trouble or f"stalled: pending work, but no progress for {self._pulse.stall_s:g} s"
                    )
                if reading is not None:
                    num_tokens = reading.num_tokens
                    self._servers.note_role(server, reading.role)
                    server.update_load(
                        reading.num_running,
                        reading.num_waiting,
                        before,
                        reading.kv_tokens,
                        reading.kv_usage,
                        reading.num_outputs,
                    )
                else:
                    server.update_load(0, 0)
                server.set_trouble(trouble)
            await asyncio.sleep(self._pulse.every_s)

    async def _poll(self, server: Server) -> tuple[str, ServerMetrics | None]:
        """Poll a server; return its trouble, "" for none, and its metrics, if available.

        Raises `OSError`, or `ValueError` for an invalid answer.
        """
        ready = await self._get(server, "/readyz")
        if ready.status in (404, 405):
            ready = await self._get(server, "/health")
        trouble = "" if ready.status == 200 else f"not ready: {ready.body[:200].decode(errors='replace')}"
        metrics = await self._get(server, "/metrics")
        if metrics.status != self._metrics_status.get(server, 200):
            _log.warning(
                "%s: /metrics answers %d%s",
                server.url,
                metrics.status,
                "" if metrics.status == 200 else "; its other clients' requests and its progress are unknown",
            )
        self._metrics_status[server] = metrics.status
        if metrics.status != 200:
            return trouble, None
        return trouble, parse_metrics(metrics.body.decode(errors="replace"))

    async def _get(self, server: Server, path: str) -> HttpAnswer:
        outgoing = Outgoing("GET", path, "", (), "route", b"", self._pulse.key)
        return await server.pool.exchange(outgoing.bytes_for(server.pool.target), is_repeatable=True)


def _has_progress(reading: ServerMetrics, num_tokens: float | None) -> bool:
    """Return whether a server has computed tokens since the last poll, or is idle."""
    return reading.num_tokens != num_tokens or not reading.num_running + reading.num_waiting


def read_list(file: Path) -> list[str]:
    """Return the URLs in a file, one a line, with comments after #. Raises `ConfigError`."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--engines {file} cannot be read: {error}") from None
    return [line for line in (line.partition("#")[0].strip() for line in lines) if line]


def _stamp_of(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
