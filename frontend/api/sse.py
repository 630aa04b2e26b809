"""Server-sent events: headers, frames and comments."""

from __future__ import annotations

CONTENT_TYPE = b"text/event-stream; charset=utf-8"
HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
KEEP_ALIVE = b": keep-alive\n"
"""Comment without a blank line: after an event with an id, OpenAI's SDKs read a blank line as an empty event."""
DONE = b"data: [DONE]\n\n"


def frame(json: bytes) -> bytes:
    """Format a JSON document as an event."""
    return b"data: " + json + b"\n\n"
