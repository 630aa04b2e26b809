"""The ASGI application: which path leads to which endpoint, and what happens around every request.

uvicorn ─▶ origins (guard.py) ─▶ App: request id, API key, errors, figures ─▶ Starlette's router ─▶ Endpoint ─▶ a function
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from urllib.parse import quote

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from quintet.frontend import health
from quintet.frontend.dialects.openai_chat import chat_completions
from quintet.frontend.dialects.openai_completions import completions
from quintet.frontend.dialects.openai_tokenize import detokenize, tokenize
from quintet.frontend.dialects.resume import resumable, streams
from quintet.frontend.exchange import ClientGone, Exchange
from quintet.frontend.guard import Keys
from quintet.frontend.metrics import metrics
from quintet.frontend.openapi import docs, openapi
from quintet.frontend.service import Handler, Service
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import MAX_SHOWN

ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/v1/completions", ("POST",), resumable(completions)),
    ("/v1/chat/completions", ("POST",), resumable(chat_completions)),
    ("/v1/streams/{id}", ("GET",), streams),
    ("/v1/models", ("GET",), health.models),
    ("/v1/models/{id:path}", ("GET",), health.model),
    ("/tokenize", ("POST",), tokenize),
    ("/detokenize", ("POST",), detokenize),
    ("/health", ("GET",), health.health),
    ("/livez", ("GET",), health.livez),
    ("/readyz", ("GET",), health.readyz),
    ("/ping", ("GET", "POST"), health.livez),
    ("/version", ("GET",), health.show_version),
    ("/load", ("GET",), health.load),
    ("/metrics", ("GET",), metrics),
    ("/openapi.json", ("GET",), openapi),
    ("/docs", ("GET",), docs),
)


@dataclass(slots=True)
class Endpoint:
    """One row of the route table as an ASGI application."""

    path: str
    methods: tuple[str, ...]
    handler: Handler
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        exchange.route = self.path
        exchange.path_params = scope["path_params"]
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in self.methods:
            allowed = ", ".join(self.methods)
            exchange.headers_out.append((b"allow", allowed.encode()))
            raise RequestError(
                ErrorCode.METHOD_NOT_ALLOWED,
                f"{self.path} does not take {exchange.method[:MAX_SHOWN]}; use {allowed}.",
            )
        await self.handler(self.service, exchange)


class App:
    """The server, as ASGI sees it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._keys = Keys(service.config.frontend.api_keys)
        self._log = logging.getLogger("quintet")
        self._log_requests = service.config.frontend.log_requests
        self._router = Router(
            routes=[
                Route(path, Endpoint(path, methods, handler, service)) for path, methods, handler in ROUTES
            ],
            redirect_slashes=False,
            default=_not_found,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP, not {scope['type']}")
        service = self._service
        exchange = Exchange(scope, receive, send)
        scope["exchange"] = exchange
        service.num_exchanges += 1
        try:
            await self._answer(exchange, scope, receive, send)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            exchange.abort()
            await asyncio.sleep(0)
        finally:
            service.num_exchanges -= 1
            service.http.answered(exchange.route, exchange.method, exchange.status or 499)
            if self._log_requests:
                self._log.info(
                    "%s %s %s %d",
                    exchange.request_id,
                    exchange.method,
                    quote(exchange.path),
                    exchange.status or 499,
                )
            service.check_drained()

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        if self._service.draining or self._service.is_retiring:
            exchange.headers_out.append((b"connection", b"close"))
        try:
            self._keys.check(exchange)
            await self._router(scope, receive, send)
        except RequestError as error:
            await exchange.respond_error(error)
        except ClientGone:
            raise
        except Exception:  # noqa: BLE001 - one request's failure must not end the others: log it, answer 500
            if not exchange.started:
                await exchange.respond_error(
                    RequestError(
                        ErrorCode.INTERNAL,
                        f"The server made a mistake; its log names request {exchange.request_id}.",
                    )
                )
            self._log.exception("request %s %s failed", exchange.request_id, quote(exchange.path))


async def _not_found(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise RequestError(
        ErrorCode.NOT_FOUND,
        f"There is nothing at {scope['path'][:MAX_SHOWN]}; /docs lists what this server has.",
    )
