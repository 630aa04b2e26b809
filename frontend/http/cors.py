"""Cross-origin access (CORS)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from quintet.wire.config import FrontendConfig


def with_cors(app: ASGIApp, config: FrontendConfig) -> ASGIApp:
    """Add CORS for the configured origins (``*`` for all).

    All methods and headers are allowed unless configured otherwise: OpenAI clients send many headers of their own.

    Chrome asks in a preflight whether a page of the Internet may call a server of a private network. Every page may only if
    it needs an API key. Starlette before 0.51 lacks the answer, so Chrome then refuses.
    """
    origins = config.allowed_origins
    if not origins:
        return app
    layer: Callable[..., ASGIApp] = CORSMiddleware
    if "allow_private_network" in inspect.signature(layer).parameters:
        layer = partial(layer, allow_private_network=bool(config.api_keys) or "*" not in origins)
    for_pages = layer(
        app,
        allow_origins=origins,
        allow_methods=config.allowed_methods or ("*",),
        allow_headers=config.allowed_headers or ("*",),
        allow_credentials=config.allow_credentials,
        expose_headers=("X-Request-Id", "Request-Id", "X-Stream-Id", "Retry-After"),
    )

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        """Bypass the CORS layer for requests without an Origin header: only browsers send it."""
        is_page = any(name == b"origin" for name, _ in scope["headers"])
        await (for_pages if is_page else app)(scope, receive, send)

    return choose
