"""ASGI application: routing, authentication, error responses and request metrics.

uvicorn ─▶ CORS (http/cors.py) ─▶ FrontendApp: id, API key, errors, metrics ─▶ Starlette router ─▶ Endpoint ─▶ handler

A thread returns free heap memory to the system shortly after a large request.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from quintet.frontend.api.openai import errors as openai_errors
from quintet.frontend.api.responses.background import resume_lost
from quintet.frontend.http.auth import Keys, operator_keys
from quintet.frontend.http.error_shape import ErrorShape
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest
from quintet.frontend.http.openapi import RouteSpec
from quintet.frontend.http.paths import normalized
from quintet.frontend.metrics import FORMAT_HEADER, LoadReport
from quintet.frontend.resume.endpoints import resume_repeated
from quintet.frontend.resume.stream_state import LAST_EVENT
from quintet.frontend.routes import ROUTES
from quintet.frontend.service import Service
from quintet.process.os_tuning import TRIM_MIN_BYTES, trim_memory
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import MAX_SHOWN, shown

TRIM_DELAY_S = 1.0
"""Delay after a large request: the connection may still hold its response."""


def schedule_trim(num_bytes: int) -> None:
    """Schedule a heap trim if a request that ended was large."""
    if num_bytes >= TRIM_MIN_BYTES:
        loop = asyncio.get_running_loop()
        loop.call_later(TRIM_DELAY_S, loop.run_in_executor, None, trim_memory)


CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Control characters; no route matches a path with one. A route's ``$`` alone also matches before a final newline."""


@dataclass(slots=True)
class Endpoint:
    """One row of the route table as an ASGI application."""

    row: RouteSpec
    service: Service
    methods: tuple[str, ...]
    keys: Keys
    load: LoadReport

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http_request: HttpRequest = scope["http_request"]
        row = self.row
        self.keys.admit(row.path, http_request.header)
        if (format_name := http_request.header(FORMAT_HEADER)) is not None and http_request.method == "POST":
            http_request.before_start = partial(self.load.headers, format_name)
        http_request.route = row.path
        http_request.path_params = scope["path_params"]
        method = "GET" if http_request.method == "HEAD" else http_request.method
        if method not in self.methods:
            allowed = ", ".join(self.methods)
            http_request.headers_out.append((b"allow", allowed.encode()))
            raise RequestError(
                ErrorCode.METHOD_NOT_ALLOWED,
                f"{row.path} does not take {http_request.method[:MAX_SHOWN]}; use {allowed}.",
            )
        if row.is_streamed and method == "POST" and http_request.header(LAST_EVENT):
            await resume_repeated(self.service, http_request)
        else:
            await row.handler(self.service, http_request)


class FrontendApp:
    """The application object that uvicorn calls."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._keys = Keys(service.config.frontend.api_keys, operators=partial(operator_keys, service.config))
        self._errors = {row.path: row.errors for row in ROUTES}
        """By path, before routing: a request without a valid key is also rejected in the error format of its API."""
        self._root_path = service.config.frontend.root_path.rstrip("/")
        self._log = logging.getLogger("quintet")
        load = LoadReport(service)
        service.on_topology = partial(resume_lost, service)
        self._log_requests = service.config.frontend.log_requests
        self._router = Router(
            routes=[Route(row.path, Endpoint(row, service, row.methods, self._keys, load)) for row in ROUTES],
            redirect_slashes=False,
            default=self._not_found,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(
                f"scope type {scope['type']!r} is not supported; this server handles only http"
            )
        service = self._service
        path: str = scope["path"]
        if path not in self._errors:
            scope["path"] = normalized(path, self._errors, self._root_path)
        http_request = HttpRequest(scope, receive, send, self._errors_of(scope["path"]))
        scope["http_request"] = http_request
        service.num_exchanges += 1
        try:
            await self._answer(http_request, scope, receive, send)
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            http_request.abort()
            await asyncio.sleep(0)
        finally:
            service.num_exchanges -= 1
            http_request.release_body()
            schedule_trim(http_request.num_bytes)
            service.http.answered(http_request.route, http_request.method, http_request.status or 499)
            if self._log_requests:
                self._log.info(
                    "%s %s %s %d",
                    http_request.request_id,
                    http_request.method,
                    quote(http_request.path),
                    http_request.status or 499,
                )
            service.check_drained()

    def _errors_of(self, path: str) -> ErrorShape:
        """Return the error format of a path. An unknown path takes that of the endpoint above it."""
        if path in self._errors:
            return self._errors[path]
        return self._errors.get("/".join(path.split("/", 3)[:3]), openai_errors.ERRORS)

    async def _answer(self, http_request: HttpRequest, scope: Scope, receive: Receive, send: Send) -> None:
        if self._service.draining or self._service.is_retiring:
            http_request.headers_out.append((b"connection", b"close"))
        try:
            await (self._not_found if CONTROL.search(scope["path"]) else self._router)(scope, receive, send)
        except RequestError as error:
            await http_request.respond_error(error)
        except ClientDisconnected:
            raise
        except Exception:  # noqa: BLE001 - log it and answer 500: one request must not end the process
            if not http_request.started:
                await http_request.respond_error(
                    RequestError(
                        ErrorCode.INTERNAL,
                        f"Internal server error (request {http_request.request_id}); see the server's log.",
                    )
                )
            self._log.exception("request %s %s failed", http_request.request_id, quote(http_request.path))

    async def _not_found(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        self._keys.check(scope["http_request"])
        raise RequestError(
            ErrorCode.NOT_FOUND,
            f"No endpoint at {shown(scope['path'])}; /docs lists the endpoints.",
        )
