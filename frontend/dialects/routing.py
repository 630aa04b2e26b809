"""What a client says of the choice of an engine, and what it is told of it."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.frontend.exchange import Exchange
from quintet.frontend.streams import Stream

SESSION_HEADER = "x-session-id"
EXPLAIN_HEADER = "x-quintet-explain"
"""With any value: the response says which engine answers, and why that one."""
ROUTING_HEADER = b"x-quintet-routing"
MAX_SESSION = 256


def session_of(exchange: Exchange, *names: str | None) -> str:
    """Return what a request has in common with others of its conversation: the header, else the first of ``names``."""
    given = (exchange.header(SESSION_HEADER), *names)
    return next((name[:MAX_SESSION] for name in given if name), "")


def explain(exchange: Exchange, streams: Sequence[Stream]) -> None:
    """Add to the response where its prompts were sent first, if the client asks."""
    is_told = any(name == ROUTING_HEADER for name, _ in exchange.headers_out)
    if exchange.header(EXPLAIN_HEADER) is not None and not is_told:
        words = [f"engine {s.choice.index}: {s.choice.reason}" for s in streams if s.choice is not None]
        exchange.headers_out.append((ROUTING_HEADER, "; ".join(words).encode()))
