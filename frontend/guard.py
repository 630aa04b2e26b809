"""Who may ask: API keys, and the browser origins that may read the answers."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from quintet.frontend.exchange import Exchange, Header
from quintet.wire.errors import ErrorCode, RequestError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping"})
"""Liveness: what an orchestrator asks without a key."""


class Keys:
    """The accepted API keys; with none configured, everybody may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, exchange: Exchange) -> None:
        """Raise `RequestError` unless the request carries a key or its path needs none."""
        if not self._keys or exchange.path in OPEN_PATHS:
            return
        given = _key_of(exchange)
        if given is None:
            raise RequestError(
                ErrorCode.UNAUTHORIZED,
                "No API key was sent; send `Authorization: Bearer <key>` or `x-api-key: <key>`.",
            )
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise RequestError(ErrorCode.UNAUTHORIZED, "The API key is not one this server accepts.")


def _key_of(exchange: Exchange) -> bytes | None:
    authorization = exchange.header("authorization") or ""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip().encode("latin-1")
    key = exchange.header("x-api-key")
    return None if key is None else key.encode("latin-1")


class Origins:
    """Cross-origin access for the configured origins alone (``*`` for all)."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def headers(self, exchange: Exchange) -> list[Header]:
        """Return the headers that let the asking page read the response."""
        origin = exchange.header("origin")
        if origin is None or not (origin in self._allowed or "*" in self._allowed):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"x-request-id, x-stream-id"),
            (b"vary", b"origin"),
        ]

    def is_preflight(self, exchange: Exchange) -> bool:
        """Say whether a browser asks, before the real request, what it may send."""
        return (
            exchange.method == "OPTIONS"
            and exchange.header("access-control-request-method") is not None
            and bool(self.headers(exchange))
        )

    async def answer_preflight(self, exchange: Exchange) -> None:
        """Allow every method and header the API has."""
        await exchange.respond(
            200,
            b"",
            b"text/plain",
            [
                (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
                (
                    b"access-control-allow-headers",
                    b"authorization, content-type, last-event-id, x-api-key, x-request-id, x-request-deadline-ms",
                ),
                (b"access-control-max-age", b"600"),
            ],
        )
