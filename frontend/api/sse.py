"""Server-sent events: headers, frames and comments."""

from __future__ import annotations

CONTENT_TYPE = b"text/event-stream; charset=utf-8"
HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
KEEP_ALIVE = b": keep-alive\n\n"
"""Comment with a blank line: clients such as Dify split a stream at blank lines, and skip parts that start with a colon."""
KEEP_ALIVE_WITH_IDS = b": keep-alive\n"
"""Comment of a stream with event ids: after an event with an id, OpenAI's SDKs read a blank line as an empty event."""
KEEP_ALIVE_EVENT = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'
"""Event of an idle stream of responses, as OpenAI's server sends it, for clients that limit the time between events."""
DONE = b"data: [DONE]\n\n"


def frame(json: bytes) -> bytes:
    """Format a JSON document as an event."""
    return b"data: " + json + b"\n\n"
