"""A server for each request that a gateway passes on itself: the router's choice and accounts, without the request's way through.

The gateway asks before it sends (`endpoint_picker.py` speaks its protocol). What it is told here are addresses and refusals; of
the answers only that they begin and end is known, so nothing is sent again and nothing goes on elsewhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Set
from dataclasses import dataclass

from quintet.deploy.router.app import AccessPolicy, check_path, errors_of
from quintet.deploy.router.dns_servers import parsed
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.request_summary import RequestSummary, read
from quintet.deploy.router.servers import HeldPrefixes, Server, Servers
from quintet.deploy.tools.load_client.connection import Target
from quintet.frontend.api.routing import SESSION_HEADER
from quintet.frontend.http.error_shape import ErrorShape
from quintet.wire.errors import ConfigError, ErrorCode, RequestError


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request."""

    path: str
    """Decoded, without the query."""
    headers: Mapping[str, str]
    """Their names in lower case."""
    among: Set[str] | None = None
    """Endpoints of which one is to be chosen; None for any."""

    @property
    def errors(self) -> ErrorShape:
        """How its client is told of errors."""
        return errors_of(self.path)


class Picker:
    """The choices that one router makes for gateways."""

    def __init__(self, servers: Servers, figures: RouterMetrics, door: AccessPolicy) -> None:
        self.servers, self.figures, self.door = servers, figures, door
        self.is_draining = False
        self.num_open = 0
        """Requests that were let in, and have not ended."""

    @property
    def is_ready(self) -> bool:
        """Whether a server takes requests, and this router."""
        return bool(self.servers.usable) and not self.is_draining

    def enter(self, head: RequestHead) -> GatewayRequest:
        """Let a request in; `GatewayRequest.leave` ends it. Raises `RequestError` as the router's door does."""
        if self.is_draining:
            raise RequestError(ErrorCode.UNAVAILABLE, "The endpoint picker is ending; ask again.", retry_s=1)
        no_path = ""  # none is open here: what is let in asks servers by the router's own key
        key = self.door.keys.admit(no_path, head.headers.get)
        check_path(head.path)
        try:
            account = self.door.limits.enter(key)
        except RequestError:
            self.figures.limited.inc()
            raise
        self.num_open += 1
        return GatewayRequest(self, head, account)


class GatewayRequest:
    """One request, from its head to the end of its answer."""

    def __init__(self, picker: Picker, head: RequestHead, account: bytes) -> None:
        self._picker, self._head, self._account = picker, head, account
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._held: HeldPrefixes | None = None

    def take(self, piece: bytes) -> None:
        """Keep a piece of the body. Raises `RequestError` where it is too much."""
        bodies = self._picker.door.bodies
        if self._num_bytes + len(piece) > bodies.max_bytes:
            raise RequestError(
                ErrorCode.TOO_LARGE,
                f"The request body has more than {bodies.max_bytes} bytes (--max-body-bytes of the endpoint picker); send less.",
            )
        bodies.keep(len(piece))
        self._num_bytes += len(piece)
        self._pieces.append(piece)

    def body(self) -> bytes:
        """Return what was taken, and keep it no longer."""
        body = b"".join(self._pieces)
        self._let_go()
        return body

    def pick(self) -> str:
        """Choose a server by what was taken, count the request there, and return its endpoint.

        Raises `RequestError` where there is none: a gateway is not kept waiting, as clients of the router are.
        """
        servers, among = self._picker.servers, self._head.among
        session = self._head.headers.get(SESSION_HEADER, "")
        body = b"".join(self._pieces)
        asked = read(body, session) if body else RequestSummary(session=session)
        without = () if among is None else [server for server in servers if endpoint_of(server) not in among]
        self._held = servers.choose(asked, without)
        if self._held is None:
            where = (
                "No server"
                if among is None
                else f"None of the {len(among)} endpoints that the gateway allows"
            )
            states = "; ".join(f"{server.url}: {server.trouble or 'is well'}" for server in servers)
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"{where} can take requests ({states or 'none is listed'}); try again shortly.",
                retry_s=1,
            )
        return endpoint_of(self._held.server)

    def answered(self, status: int) -> None:
        """The head of the answer has come: one that is refused says nothing of how fast the server answers."""
        if self._held is not None:
            self._picker.figures.answered(self._held.server, status)
            if status != 200:
                self._held.num_before = 0

    def begin(self) -> None:
        """The first of the answer has come."""
        if self._held is not None:
            self._held.answer()

    def leave(self) -> None:
        """It has ended, or nobody tells its end."""
        self._let_go()
        if self._held is not None:
            self._held.leave()
        self._picker.door.limits.leave(self._account)
        self._picker.num_open -= 1

    def _let_go(self) -> None:
        self._picker.door.bodies.let_go(self._num_bytes)
        self._pieces, self._num_bytes = [], 0


def endpoint_of(server: Server) -> str:
    """Return where a gateway connects to: ``10.0.0.5:8000``, ``[fd00::5]:8000``."""
    target = server.lines.target
    return f"[{target.host}]:{target.port}" if ":" in target.host else f"{target.host}:{target.port}"


def by_address(url: str) -> Target:
    """Read the address of a server that a gateway can be sent to. Raises `ConfigError`."""
    target = parsed(url)
    try:
        ipaddress.ip_address(target.host)
    except ValueError:
        raise ConfigError(
            f"{url!r} names its host, and gateways take endpoints by address alone: write its address, or for all addresses "
            f"of the name --engine-dns {url}"
        ) from None
    if target.prefix:
        raise ConfigError(
            f"{url!r} has a path, which an endpoint picker cannot put before those of requests: serve at the root"
        )
    return target
