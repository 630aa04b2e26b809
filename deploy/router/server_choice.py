"""Choice of a server for requests that a gateway forwards: the router's load balancing without its proxy.

The gateway asks for an endpoint before it sends (`endpoint_picker.py` implements its protocol). The picker returns
addresses or errors. It sees only the start and the end of answers, so it neither retries requests nor resumes streams.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Set
from dataclasses import dataclass

from quintet.deploy.http_client.connection import Target
from quintet.deploy.router.app import AccessPolicy, check_path
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.request_summary import RequestSummary, read
from quintet.deploy.router.servers import HeldPrefixes, Servers
from quintet.deploy.router.watch import parsed
from quintet.frontend.api.answer import SESSION_HEADER
from quintet.wire.errors import ConfigError, ErrorCode, RequestError


@dataclass(frozen=True, slots=True)
class RequestHead:
    path: str
    """Decoded, without the query."""
    headers: Mapping[str, str]
    """By lower-case name."""
    among: Set[str] | None = None
    """Allowed endpoints; None for any."""


class Picker:
    """Chooses servers for the requests of gateways."""

    def __init__(self, servers: Servers, metrics: RouterMetrics, policy: AccessPolicy) -> None:
        self.servers, self.metrics, self.policy = servers, metrics, policy
        self.is_draining = False
        self.num_open = 0
        """Admitted requests that have not ended."""

    @property
    def is_ready(self) -> bool:
        """True if a server is usable and the picker is not draining."""
        return bool(self.servers.usable) and not self.is_draining

    def admit(self, head: RequestHead) -> GatewayRequest:
        """Admit a request; `GatewayRequest.release` ends it. Raises `RequestError` for authentication and limits."""
        if self.is_draining:
            raise RequestError(ErrorCode.UNAVAILABLE, "The endpoint picker is draining; retry.", retry_s=1)
        no_path = ""  # all paths need a key, because admitted requests use the servers' key
        key = self.policy.keys.admit(no_path, head.headers.get)
        check_path(head.path)
        try:
            account = self.policy.limits.begin_request(key)
        except RequestError:
            self.metrics.limited.inc()
            raise
        self.num_open += 1
        return GatewayRequest(self, head, account)


class GatewayRequest:
    """One request of a gateway, from its head to the end of its answer."""

    def __init__(self, picker: Picker, head: RequestHead, account: bytes) -> None:
        self._picker, self._head, self._account = picker, head, account
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._held: HeldPrefixes | None = None

    def take(self, chunk: bytes) -> None:
        """Buffer a chunk of the body. Raises `RequestError` if the body is too large."""
        bodies = self._picker.policy.bodies
        if self._num_bytes + len(chunk) > bodies.max_bytes:
            raise RequestError(
                ErrorCode.TOO_LARGE,
                f"The request body exceeds {bodies.max_bytes} bytes (--max-body-bytes of the endpoint picker); send a "
                "smaller body.",
            )
        bodies.retain(len(chunk))
        self._num_bytes += len(chunk)
        self._chunks.append(chunk)

    def body(self) -> bytes:
        """Return the buffered body and release the buffer."""
        body = b"".join(self._chunks)
        self._release_body()
        return body

    def pick(self) -> str:
        """Choose a server by the buffered body, count the request there, and return its endpoint.

        Raises `RequestError` if there is no server; a gateway does not wait for one, unlike clients of the router.
        """
        servers, among = self._picker.servers, self._head.among
        session = self._head.headers.get(SESSION_HEADER, "")
        body = b"".join(self._chunks)
        summary = read(body, session) if body else RequestSummary(session=session)
        without = (
            () if among is None else [each for each in servers if each.pool.target.authority not in among]
        )
        self._held = servers.choose(summary, without)
        if self._held is None:
            subject = (
                "No server"
                if among is None
                else f"None of the {len(among)} endpoints that the gateway allows"
            )
            states = "; ".join(f"{server.url}: {server.trouble or 'ready'}" for server in servers)
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"{subject} is available ({states or 'none is listed'}); retry shortly.",
                retry_s=1,
            )
        return self._held.server.pool.target.authority

    def answered(self, status: int) -> None:
        """Count the status of the answer. An error does not measure the server's speed."""
        if self._held is not None:
            self._picker.metrics.answered(self._held.server, status)
            if status != 200:
                self._held.num_before = 0

    def begin(self) -> None:
        """Record the first byte of the answer."""
        if self._held is not None:
            self._held.answer()

    def release(self) -> None:
        self._release_body()
        if self._held is not None:
            self._held.release()
        self._picker.policy.limits.end_request(self._account)
        self._picker.num_open -= 1

    def _release_body(self) -> None:
        self._picker.policy.bodies.release(self._num_bytes)
        self._chunks, self._num_bytes = [], 0


def by_address(url: str) -> Target:
    """Parse the URL of a server for gateways. Raises `ConfigError`."""
    target = parsed(url)
    try:
        ipaddress.ip_address(target.host)
    except ValueError:
        raise ConfigError(
            f"{url!r} has a host name, but gateways accept only IP addresses: use the address, or --engine-dns {url} for "
            "all addresses of the name"
        ) from None
    if target.prefix:
        raise ConfigError(
            f"{url!r} has a path, but an endpoint picker cannot add a prefix to request paths: serve at the root"
        )
    return target
