"""Authentication by API key."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from quintet.frontend.http.http_request import HttpRequest
from quintet.process.sockets import run_key
from quintet.wire.config import EngineConfig
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
"""Paths that need no key: health checks and API documentation."""

OPERATORS_PATH = "/kv"
"""Root of the paths for operators."""
KEY_HEADERS = ("x-api-key", "api-key")
"""Headers with a key instead of Authorization: those of Anthropic's and Azure's clients."""


def is_operators(path: str) -> bool:
    """Test whether a path needs the operator's key."""
    return path == OPERATORS_PATH or path.startswith(OPERATORS_PATH + "/")


def operator_keys(config: EngineConfig) -> list[str]:
    """Return the accepted operator keys: --admin-key, and one derived from the key in the run folder.

    Read access to the run folder thus replaces a key: ``quintet admin``.
    """
    derived = hmac.new(run_key(config.run_dir), b"operator", "sha256").hexdigest()
    return [derived, *filter(None, [config.frontend.admin_key])]


def is_open(path: str) -> bool:
    """Test whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith("/docs/")


class Keys:
    """Accepted API keys; without any, all clients are accepted. Operator paths need an operator key."""

    def __init__(
        self,
        keys: Sequence[str],
        is_open: Callable[[str], bool] = is_open,
        operators: Callable[[], list[str]] | None = None,
    ) -> None:
        """``is_open``: tests whether a path needs no key. ``operators``: returns the keys of operator paths, if any."""
        self._keys, self._is_open = [key.encode() for key in keys], is_open
        self._operators = operators

    def check(self, http_request: HttpRequest) -> bytes:
        """Return the request's key; empty for none. Raises `RequestError` for a missing or wrong key."""
        return self.admit(http_request.path, http_request.header)

    def admit(self, path: str, header: Callable[[str], str | None]) -> bytes:
        """Check a path and its headers, given by lower-case name, as `check` does."""
        given, keys = _keys_of(header), self._keys
        if self._operators is not None and is_operators(path):
            keys = [key.encode() for key in self._operators()]
            wrong = (
                "This path requires the operator key: send `Authorization: Bearer <key>` with the key of --admin-key, or use "
                "`quintet admin kv` on the server's machine."
            )
        elif not keys or self._is_open(path):
            return given[0] if given else b""
        elif given:
            wrong = "The API key is invalid."
        else:
            wrong = "No API key was sent; send `Authorization: Bearer <key>` or `x-api-key: <key>`."
        # Every pair is compared, so the time depends only on lengths.
        pairs = [(each, hmac.compare_digest(each, key)) for each in given for key in keys]
        matches = [each for each, is_equal in pairs if is_equal]
        if not matches:
            raise RequestError(ErrorCode.UNAUTHORIZED, wrong)
        return matches[0]


def _keys_of(header: Callable[[str], str | None]) -> list[bytes]:
    """Return the keys of a request. Clients behind a gateway may send several, of which one is for this server."""
    authorization = header("authorization") or ""
    scheme, _, credentials = authorization.partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else ""
    given = [bearer or None, *(header(name) for name in KEY_HEADERS)]
    return [key.encode("latin-1", "replace") for key in given if key is not None]
