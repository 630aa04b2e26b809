"""ASGI application of the router: answers its own paths and proxies all others."""

from __future__ import annotations

import logging
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from starlette.types import Receive, Scope, Send

from quintet.deploy.router.limits import Limits
from quintet.deploy.router.metrics import RouterMetrics
from quintet.deploy.router.proxy import ProxiedRequest, ProxyTimeouts
from quintet.deploy.router.request_summary import RequestSummary, read
from quintet.deploy.router.servers import Server, Servers
from quintet.deploy.router.upstream import RELAY, Outgoing
from quintet.frontend.api.answer import SESSION_HEADER
from quintet.frontend.api.anthropic import errors as anthropic_errors
from quintet.frontend.api.openai import errors as openai_errors
from quintet.frontend.http.auth import Keys
from quintet.frontend.http.bodies import BodyBuffers
from quintet.frontend.http.error_shape import ErrorShape
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest
from quintet.frontend.http.paths import normalized
from quintet.frontend.metrics import CONTENT_TYPE
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.params import shown

RELAYED = ((RELAY, b"1"),)
OPEN_PATHS = frozenset({"/livez", "/readyz"})
"""Paths of the router that need no key. Proxied paths always need one, because they use the servers' key."""
_log = logging.getLogger("quintet")


class AccessPolicy(NamedTuple):
    """Authentication and limits of requests."""

    keys: Keys
    limits: Limits
    bodies: BodyBuffers
    servers_key: str
    """API key for the servers, which replaces the client's key; "" forwards the client's key."""


class RouterApp:
    def __init__(
        self, servers: Servers, metrics: RouterMetrics, timeouts: ProxyTimeouts, policy: AccessPolicy
    ) -> None:
        self._servers, self._metrics, self._timeouts, self._policy = servers, metrics, timeouts, policy
        self.is_draining = False
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this router speaks HTTP, not {scope['type']}")
        scope["path"] = normalized(scope["path"])
        http_request = HttpRequest(scope, receive, send, errors_of(scope["path"]))
        if self.is_draining:
            http_request.headers_out.append((b"connection", b"close"))
        self.num_open += 1
        try:
            await self._answer(http_request, scope["headers"])
        except RequestError as error:
            await self._end(http_request, error)
        except ClientDisconnected:
            pass
        except Exception:  # noqa: BLE001 - one request's failure must not end the others: log it, answer 500
            _log.exception("request %s %s failed", http_request.request_id, quote(http_request.path))
            message = f"Internal error of the router (request {http_request.request_id}); see its log."
            await self._end(http_request, RequestError(ErrorCode.INTERNAL, message))
        finally:
            self.num_open -= 1

    async def _end(self, http_request: HttpRequest, error: RequestError) -> None:
        """Send an error to the client: as a response, or as the last event of a started stream."""
        if not http_request.started:
            await http_request.respond_error(error)
            self._metrics.answered(None, http_request.status)
            return
        body = http_request.errors.body(error, http_request.request_id)
        is_messages = http_request.errors is anthropic_errors.ERRORS
        frame = (
            b"event: error\ndata: " + body + b"\n\n"
            if is_messages
            else b"data: " + body + b"\n\ndata: [DONE]\n\n"
        )
        await http_request.write(frame, last=True)

    async def _answer(self, http_request: HttpRequest, headers: list[tuple[bytes, bytes]]) -> None:
        key = self._policy.keys.check(http_request)
        match http_request.path:
            case "/livez":
                await http_request.respond(200, b"ok", b"text/plain")
            case "/readyz":
                is_ready = bool(self._servers.usable) and not self.is_draining
                await http_request.respond_json(
                    {"ready": is_ready, "servers": len(self._servers.usable), "draining": self.is_draining},
                    200 if is_ready else 503,
                )
            case "/metrics":
                bodies = self._policy.bodies
                self._metrics.held_bodies.set(bodies.num_open_bytes + bodies.num_retained_bytes)
                await http_request.respond(200, self._metrics.text(), CONTENT_TYPE)
            case "/servers":
                await http_request.respond(
                    200, msgspec.json.encode([_server_state(server) for server in self._servers])
                )
            case _:
                await self._proxy(http_request, headers, key)

    async def _proxy(self, http_request: HttpRequest, headers: list[tuple[bytes, bytes]], key: bytes) -> None:
        policy = self._policy
        if self.is_draining:  # the request came over an open connection
            raise RequestError(ErrorCode.UNAVAILABLE, "The router is draining; reconnect.", retry_s=1)
        check_path(http_request.path)
        try:
            account = policy.limits.begin_request(key)
        except RequestError:
            self._metrics.limited.inc()
            raise
        num_kv_tokens = 0
        try:
            has_body = http_request.method in ("POST", "PUT", "PATCH")
            body = await http_request.read_json_body(policy.bodies) if has_body else b""
            if body:
                policy.bodies.retain(len(body))
                num_kv_tokens = len(body)
            summary = read(body, http_request.header(SESSION_HEADER) or "") if body else RequestSummary()
            outgoing = Outgoing(
                "GET" if http_request.method == "HEAD" else http_request.method,
                quote(http_request.path),
                http_request.query,
                headers,
                http_request.request_id,
                body,
                policy.servers_key,
                RELAYED if summary.is_streamed else (),
            )
            await ProxiedRequest(self._servers, self._metrics, self._timeouts, http_request).answer(
                outgoing, summary
            )
        finally:
            policy.bodies.release(num_kv_tokens)
            policy.limits.end_request(account)


def errors_of(path: str) -> ErrorShape:
    return anthropic_errors.ERRORS if path.startswith("/v1/messages") else openai_errors.ERRORS


def check_path(path: str) -> None:
    """Reject a decoded path with dot segments, which a server may resolve to another path."""
    if not {".", ".."}.isdisjoint(path.split("/")):
        raise invalid(f"The path is {shown(path)}; send it without the segments . and .. in it.")


def _server_state(server: Server) -> dict[str, object]:
    return {
        "url": server.url,
        "trouble": server.trouble,
        "is_leaving": server.is_leaving,
        "num_open": server.num_open,
        "num_queued": server.num_queued,
        "num_others": server.num_others,
        "role": server.role,
    }
