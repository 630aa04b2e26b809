"""ASGI application: route table, authentication, error responses and request metrics.

uvicorn ─▶ CORS (http/auth.py) ─▶ App: request id, API key, errors, metrics ─▶ Starlette router ─▶ Endpoint ─▶ handler

A thread returns free heap memory to the system shortly after a large request.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from urllib.parse import quote

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from quintet.frontend import health, kv
from quintet.frontend.api.anthropic import errors as anthropic_errors
from quintet.frontend.api.anthropic.messages import count_tokens, messages, render_messages
from quintet.frontend.api.inference.generate import generate
from quintet.frontend.api.openai import errors as openai_errors
from quintet.frontend.api.openai.batch import batch
from quintet.frontend.api.openai.chat import chat_completions
from quintet.frontend.api.openai.completions import completions
from quintet.frontend.api.openai.derender import derender_chat, derender_completions
from quintet.frontend.api.openai.invocations import invocations
from quintet.frontend.api.openai.render import render_chat, render_completions
from quintet.frontend.api.openai.tokenize import detokenize, tokenize, tokenizer_info
from quintet.frontend.api.responses.background import take_over_lost
from quintet.frontend.api.responses.conversations import conversation, conversations
from quintet.frontend.api.responses.conversations import item as conversation_item
from quintet.frontend.api.responses.conversations import items as conversation_items
from quintet.frontend.api.responses.create import render_responses, responses
from quintet.frontend.api.responses.stored import cancel_response, input_items, response
from quintet.frontend.http.auth import Keys, operator_keys
from quintet.frontend.http.docs_page import docs, docs_part
from quintet.frontend.http.error_shape import ErrorShape
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest, tidy_path
from quintet.frontend.http.openapi import openapi
from quintet.frontend.load_balancing.load_report import FORMAT_HEADER, LoadReport
from quintet.frontend.metrics import metrics
from quintet.frontend.resume.continue_stream import continue_stream
from quintet.frontend.resume.resume_stream import resumable, streams
from quintet.frontend.service import Handler, Service
from quintet.process.os_tuning import TRIM_MIN_BYTES, trim_memory
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import MAX_SHOWN

TRIM_DELAY_S = 1.0
"""Delay after a large request: the connection may still hold its response."""


def schedule_trim(num_bytes: int) -> None:
    """Schedule a heap trim if a request that ended was large."""
    if num_bytes >= TRIM_MIN_BYTES:
        loop = asyncio.get_running_loop()
        loop.call_later(TRIM_DELAY_S, loop.run_in_executor, None, trim_memory)


class RouteSpec(NamedTuple):
    """One row of the route table."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    errors: ErrorShape = openai_errors.ERRORS
    """Error format of the path's API."""


ALIAS, ALIASED = "/openai", "/openai/v1/"
"""Azure's path prefix, and the paths on which it is removed."""

ROUTES = (
    RouteSpec("/v1/completions", ("POST",), resumable(completions)),
    RouteSpec("/v1/chat/completions", ("POST",), resumable(chat_completions)),
    RouteSpec("/v1/chat/completions/batch", ("POST",), batch),
    RouteSpec("/v1/chat/completions/render", ("POST",), render_chat),
    RouteSpec("/v1/completions/render", ("POST",), render_completions),
    RouteSpec("/v1/chat/completions/derender", ("POST",), derender_chat),
    RouteSpec("/v1/completions/derender", ("POST",), derender_completions),
    RouteSpec("/v1/messages", ("POST",), resumable(messages), anthropic_errors.ERRORS),
    RouteSpec("/v1/messages/count_tokens", ("POST",), count_tokens, anthropic_errors.ERRORS),
    RouteSpec("/v1/messages/render", ("POST",), render_messages, anthropic_errors.ERRORS),
    RouteSpec("/v1/responses", ("POST",), resumable(responses)),
    RouteSpec("/v1/responses/render", ("POST",), render_responses),
    RouteSpec("/v1/responses/{id}", ("GET", "DELETE"), response),
    RouteSpec("/v1/responses/{id}/cancel", ("POST",), cancel_response),
    RouteSpec("/v1/responses/{id}/input_items", ("GET",), input_items),
    RouteSpec("/v1/conversations", ("POST",), conversations),
    RouteSpec("/v1/conversations/{id}", ("GET", "POST", "DELETE"), conversation),
    RouteSpec("/v1/conversations/{id}/items", ("GET", "POST"), conversation_items),
    RouteSpec("/v1/conversations/{id}/items/{item_id}", ("GET", "DELETE"), conversation_item),
    RouteSpec("/inference/v1/generate", ("POST",), resumable(generate)),
    RouteSpec("/v1/streams", ("POST",), continue_stream),
    RouteSpec("/v1/streams/{id}", ("GET",), streams),
    RouteSpec("/v1/models", ("GET",), health.models),
    RouteSpec("/v1/models/{id:path}", ("GET",), health.model),
    RouteSpec("/tokenize", ("POST",), tokenize),
    RouteSpec("/detokenize", ("POST",), detokenize),
    RouteSpec("/tokenizer_info", ("GET",), tokenizer_info),
    RouteSpec("/health", ("GET",), health.health),
    RouteSpec("/livez", ("GET",), health.livez),
    RouteSpec("/readyz", ("GET",), health.readyz),
    RouteSpec("/ping", ("GET", "POST"), health.livez),
    RouteSpec("/v2/health/live", ("GET",), health.v2_live),
    RouteSpec("/v2/health/ready", ("GET",), health.readyz),
    RouteSpec("/v2/models/{id:path}/ready", ("GET",), health.v2_model_ready),
    RouteSpec("/invocations", ("POST",), resumable(invocations)),
    RouteSpec("/version", ("GET",), health.show_version),
    RouteSpec("/load", ("GET",), health.load),
    RouteSpec("/metrics", ("GET",), metrics),
    RouteSpec("/kv", ("GET",), kv.listing),
    RouteSpec("/kv/pin", ("POST",), kv.pin),
    RouteSpec("/kv/unpin", ("POST",), kv.unpin),
    RouteSpec("/kv/evict", ("POST",), kv.evict),
    RouteSpec("/kv/export", ("POST",), kv.export_prefix),
    RouteSpec("/kv/import", ("POST",), kv.import_prefix),
    RouteSpec("/openapi.json", ("GET",), openapi),
    RouteSpec("/docs", ("GET",), docs),
    RouteSpec("/docs/{name}", ("GET",), docs_part),
)


@dataclass(slots=True)
class Endpoint:
    """One row of the route table as an ASGI application."""

    row: RouteSpec
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http_request: HttpRequest = scope["http_request"]
        row = self.row
        http_request.route = row.path
        http_request.path_params = scope["path_params"]
        method = "GET" if http_request.method == "HEAD" else http_request.method
        if method not in row.methods:
            allowed = ", ".join(row.methods)
            http_request.headers_out.append((b"allow", allowed.encode()))
            raise RequestError(
                ErrorCode.METHOD_NOT_ALLOWED,
                f"{row.path} does not take {http_request.method[:MAX_SHOWN]}; use {allowed}.",
            )
        await row.handler(self.service, http_request)


class App:
    """The application object that uvicorn calls."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._keys = Keys(service.config.frontend.api_keys, operators=partial(operator_keys, service.config))
        self._errors = {row.path: row.errors for row in ROUTES}
        """By path, before routing: a request without a valid key is also rejected in the error format of its API."""
        self._root_path = service.config.frontend.root_path.rstrip("/")
        self._log = logging.getLogger("quintet")
        self._load = LoadReport(service)
        service.on_topology = partial(take_over_lost, service)
        self._log_requests = service.config.frontend.log_requests
        self._router = Router(
            routes=[Route(row.path, Endpoint(row, service)) for row in ROUTES],
            redirect_slashes=False,
            default=_not_found,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(
                f"scope type {scope['type']!r} is not supported; this server handles only http"
            )
        service = self._service
        path: str = scope["path"]
        if path not in self._errors:
            scope["path"] = self._normalized(path)
        http_request = HttpRequest(scope, receive, send, openai_errors.ERRORS)
        http_request.errors = self._errors_of(http_request.path)
        scope["http_request"] = http_request
        if (format_name := http_request.header(FORMAT_HEADER)) is not None and http_request.method == "POST":
            http_request.before_start = partial(self._load.headers, format_name)
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

    def _normalized(self, path: str) -> str:
        """Normalize a path: merge slashes, strip --root-path unless a route begins with it, strip Azure's prefix."""
        path = tidy_path(path)
        if path in self._errors:
            return path
        root = self._root_path
        if root and path.startswith(root + "/"):
            path = path.removeprefix(root)
        return path.removeprefix(ALIAS) if path.startswith(ALIASED) else path

    async def _answer(self, http_request: HttpRequest, scope: Scope, receive: Receive, send: Send) -> None:
        if self._service.draining or self._service.is_retiring:
            http_request.headers_out.append((b"connection", b"close"))
        try:
            self._keys.check(http_request)
            await self._router(scope, receive, send)
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


async def _not_found(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise RequestError(
        ErrorCode.NOT_FOUND,
        f"No endpoint at {scope['path'][:MAX_SHOWN]}; /docs lists the endpoints.",
    )
