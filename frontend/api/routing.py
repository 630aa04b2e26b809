"""What a client says of the choice of an engine, and what it is told of it."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.streams import Stream

SESSION_HEADER = "x-session-id"
EXPLAIN_HEADER = "x-quintet-explain"
"""With any value: the response says which engine answers, and why that one."""
ROUTING_HEADER = b"x-quintet-routing"
MAX_SESSION = 256
MAX_EXPLAINED = 16
"""Prompts of one request. Clients and proxies take headers of some thousand bytes."""


def session_of(exchange: HttpRequest, *names: str | None) -> str:
    """Return what a request has in common with others of its conversation: the header, else the first of ``names``."""
    for name in (exchange.header(SESSION_HEADER), *names):
        if name:
            return name[:MAX_SESSION]
    return ""


def explain(exchange: HttpRequest, streams: Sequence[Stream]) -> None:
    """Add to the response where its prompts were sent first, if the client asks; of a beam search, in its first round."""
    if exchange.header(EXPLAIN_HEADER) is None:
        return
    is_told = any(name == ROUTING_HEADER for name, _ in exchange.headers_out)
    if not is_told:
        choices = [stream.choice for stream in streams if stream.choice is not None]
        words = [f"engine {choice.index}: {choice.reason}" for choice in choices[:MAX_EXPLAINED]]
        if len(choices) > MAX_EXPLAINED:
            words.append(f"and {len(choices) - MAX_EXPLAINED} prompts more")
        exchange.headers_out.append((ROUTING_HEADER, "; ".join(words).encode()))
