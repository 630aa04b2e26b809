"""Routing headers: session key in requests, chosen engine in responses."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.streams import Stream

SESSION_HEADER = "x-session-id"
EXPLAIN_HEADER = "x-quintet-explain"
"""With any value, the response names the chosen engine and the reason."""
ROUTING_HEADER = b"x-quintet-routing"
MAX_SESSION = 256
MAX_EXPLAINED = 16
"""Maximum prompts listed: clients and proxies limit headers to a few KiB."""


def session_of(http_request: HttpRequest, *names: str | None) -> str:
    """Return the session key: the header, else the first non-empty one of ``names``."""
    for name in (http_request.header(SESSION_HEADER), *names):
        if name:
            return name[:MAX_SESSION]
    return ""


def explain(http_request: HttpRequest, streams: Sequence[Stream]) -> None:
    """On request, add the first engine choice of each prompt to the response headers; for a beam search, of round one."""
    if http_request.header(EXPLAIN_HEADER) is None:
        return
    is_explained = any(name == ROUTING_HEADER for name, _ in http_request.headers_out)
    if not is_explained:
        choices = [stream.choice for stream in streams if stream.choice is not None]
        words = [f"engine {choice.index}: {choice.reason}" for choice in choices[:MAX_EXPLAINED]]
        if len(choices) > MAX_EXPLAINED:
            words.append(f"and {len(choices) - MAX_EXPLAINED} prompts more")
        http_request.headers_out.append((ROUTING_HEADER, "; ".join(words).encode()))
