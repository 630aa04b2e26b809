"""Who may ask: API keys, and the browser origins that may read the answers."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from quintet.frontend.http.http_request import HttpRequest
from quintet.process.frame_hmac import run_key
from quintet.wire.config import EngineConfig, FrontendConfig
from quintet.wire.errors import ErrorCode, RequestError

OPEN_PATHS = frozenset(
    {
        "/livez",
        "/readyz",
        "/health",
        "/ping",
        "/v2/health/live",
        "/v2/health/ready",
        "/openapi.json",
        "/docs",
    }
)
"""What is told without a key: whether the server lives, as orchestrators ask, and how it is spoken to."""


OPERATORS_PATH = "/kv"
"""What lies here and below is for who operates the server."""


def is_operators(path: str) -> bool:
    """Return whether a path needs the operator's key."""
    return path == OPERATORS_PATH or path.startswith(OPERATORS_PATH + "/")


def operator_keys(config: EngineConfig) -> list[str]:
    """Return what operators may send: what the configuration says, and what follows from the key in the run folder.

    So who may read that folder needs no key of his own: ``quintet admin``.
    """
    derived = hmac.new(run_key(config.run_dir), b"operator", "sha256").hexdigest()
    return [derived, *filter(None, [config.frontend.admin_key])]


def is_open(path: str) -> bool:
    """Return whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith("/docs/")


class Keys:
    """The accepted API keys; with none configured, everybody may ask. But what is the operator's, he alone may, with his."""

    def __init__(
        self,
        keys: Sequence[str],
        is_open: Callable[[str], bool] = is_open,
        operators: Callable[[], list[str]] | None = None,
    ) -> None:
        """``is_open``: whether a path needs none. operators: returns the keys for `is_operators`, where there are such paths."""
        self._keys, self._is_open = [key.encode() for key in keys], is_open
        self._operators = operators

    def check(self, exchange: HttpRequest) -> bytes:
        """Return the request's key, however it was sent; empty for none. Raises `RequestError` where it needs another."""
        return self.admit(exchange.path, exchange.header)

    def admit(self, path: str, header: Callable[[str], str | None]) -> bytes:
        """The same, of a request with this path and these headers (by names in lower case)."""
        given = _key_of(header)
        if self._operators is not None and is_operators(path):
            return _admit_operator(given, self._operators())
        if not self._keys or self._is_open(path):
            return given or b""
        if given is None:
            raise RequestError(
                ErrorCode.UNAUTHORIZED,
                "No API key was sent; send `Authorization: Bearer <key>` or `x-api-key: <key>`.",
            )
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise RequestError(ErrorCode.UNAUTHORIZED, "The API key is not one this server accepts.")
        return given


def _admit_operator(given: bytes | None, keys: Sequence[str]) -> bytes:
    """Return the key that was given, if it is one of these. Raises `RequestError`."""
    matches = [hmac.compare_digest(given or b"", key.encode()) for key in keys]
    if not any(matches):
        raise RequestError(
            ErrorCode.UNAUTHORIZED,
            "This is for who operates the server: send `Authorization: Bearer <key>` with the key of --admin-key, or use "
            "`quintet admin kv` on the server's machine.",
        )
    return given or b""


def _key_of(header: Callable[[str], str | None]) -> bytes | None:
    authorization = header("authorization") or ""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip().encode("latin-1", "replace")
    key = header("x-api-key")
    return None if key is None else key.encode("latin-1", "replace")


def open_to(app: ASGIApp, config: FrontendConfig) -> ASGIApp:
    """Return the application with cross-origin access for the configured origins alone (``*`` for all).

    Unless configured otherwise pages may use any method and send any header: clients of this dialect have many of their
    own, and keys decide who is served.
    """
    if not config.allowed_origins:
        return app
    for_pages = CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods or ("*",),
        allow_headers=config.allowed_headers or ("*",),
        allow_credentials=config.allow_credentials,
        expose_headers=("X-Request-Id", "Request-Id", "X-Stream-Id"),
    )

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        """Only browsers send an origin: for others no layer stands between the answer and the socket."""
        is_page = any(name == b"origin" for name, _ in scope["headers"])
        await (for_pages if is_page else app)(scope, receive, send)

    return choose
