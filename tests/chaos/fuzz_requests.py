"""Random and mutated requests for every route of a server: heads, framing, JSON, bodies with wrong values."""

from __future__ import annotations

import json
import math
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quintet.wire.params import SamplingParams

from ..processes.server import Server
from .fuzz_frames import EDGES, FLOATS, TEXTS, Frames

BODIES = Path(__file__).parents[1] / "http_api" / "bodies"
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/x", "/health",
    "/livez", "/readyz", "/ping", "/v2/health/ready", "/version", "/load", "/metrics", "/openapi.json", "/docs",
    "/", "/nothing/here", "/v1/streams/abc", "/v1/streams/abc?from=1",
)  # fmt: skip
ALLOWED_5XX = {503}
CLIENT_TIMEOUT_S = 0.2
"""Client timeout; after it the client disconnects."""


class HttpFuzz:
    """Sender of requests to all routes of a server; records the statuses."""

    def __init__(self, server: Server, draw: random.Random) -> None:
        parts = urlsplit(server.url)
        assert parts.hostname is not None and parts.port is not None
        self._address = (parts.hostname, parts.port)
        self._draw = draw
        self._bodies = _recorded_bodies()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[tuple[int, bytes]] = []
        """Forbidden statuses and their requests."""

    def send(self) -> None:
        """Send one request or a malformed one, and read the status line."""
        request = self._draw.choice((self._broken, self._framed, self._framed, self._typed, self._typed))()
        with socket.create_connection(self._address, CLIENT_TIMEOUT_S) as connection:
            try:
                connection.sendall(request)
                if self._draw.random() < 0.3:
                    connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
            except OSError:  # the server closed the connection
                return
        if answer.startswith(b"HTTP/1.1 ") and answer[9:12].isdigit():
            status = int(answer[9:12])
            self.statuses[status] += 1
            if status >= 500 and status not in ALLOWED_5XX:
                self.wrong.append((status, request))

    def _head(self, path: str, *fields: str, method: str = "POST") -> bytes:
        return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: x", *fields, "", "")).encode(
            "utf-8", "replace"
        )

    def _broken(self) -> bytes:
        """Return an invalid request head."""
        draw = self._draw
        head = self._head(
            draw.choice(PATHS), "Content-Length: 2", method=draw.choice(("GET", "POST", "PUT", "HEAD", "X"))
        )
        match draw.randrange(6):
            case 0:
                return draw.randbytes(draw.randrange(1, 300))
            case 1:
                return head[: draw.randrange(len(head))]
            case 2:
                return Frames(draw).mutated(head) + b"{}"
            case 3:
                return b"GET /" + b"a" * draw.choice((100, 70000)) + b" HTTP/1.1\r\n\r\n"
            case 4:
                return self._head(f"/{chr(draw.randrange(1, 0x2FF))}%00%ff%zz?{'a=' * 50}", method="GET")
            case _:
                return self._head(
                    "/health", *(f"X-{i}: {'v' * 50}" for i in range(draw.choice((5, 2000)))), method="GET"
                )

    def _framed(self) -> bytes:
        """Return a body with a wrong length, wrong chunks or invalid JSON."""
        draw = self._draw
        path = draw.choice(PATHS)
        body = draw.choice((
            b"", b"{", b"null", b"[]", b"{}" * 3, b"\0" * 20, b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 50_000,
            b'{"prompt": "\\ud800"}', b'{"prompt": "\\u0000", "max_tokens": 2}', b'{"prompt": 1e99999}',
            b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", draw.randbytes(100),
        ))  # fmt: skip
        match draw.randrange(6):
            case 0:
                fields = [f"Content-Length: {draw.choice((-1, 0, 1, 1 << 70, 'abc', '1, 2', ''))}"]
            case 1:
                fields = ["Transfer-Encoding: chunked"]
                body = draw.choice(
                    (b"zz\r\n", b"5\r\nab\r\n0\r\n\r\n", b"ffffffffffffffff\r\na", b"-1\r\n\r\n", b"0\r\n")
                )
            case 2:
                fields = ["Transfer-Encoding: chunked", f"Content-Length: {len(body)}"]
            case _:
                fields = [f"Content-Length: {len(body)}"]
        kind = draw.choice(
            ("application/json", "text/plain", "application/json; charset=\0", "multipart/form-data", "")
        )
        return self._head(path, f"Content-Type: {kind}", *fields) + body

    def _typed(self) -> bytes:
        """Return a recorded body with one or two values of another type or size."""
        draw = self._draw
        body = json.loads(json.dumps(draw.choice(self._bodies)))
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        path = draw.choice((path, path, path, "/tokenize", "/detokenize"))
        for _ in range(draw.choice((1, 1, 2))):
            self._corrupt(body)
        body["max_tokens"] = body.get("max_tokens", 4) if draw.random() < 0.5 else 4
        words = json.dumps(body).encode()
        fields = [f"Content-Length: {len(words)}", "Content-Type: application/json"]
        if draw.random() < 0.2:
            fields.append(f"{draw.choice(HEADERS)}: {draw.choice(('', '-1', 'nan', 'x' * 300, '9' * 30))}")
        return self._head(path, *fields) + words

    def _corrupt(self, body: Any) -> None:
        """Replace a random value, or add a known field."""
        draw, node = self._draw, body
        while True:
            keys: Sequence[Any] = list(node) if isinstance(node, dict) else range(len(node))
            inner = [key for key in keys if isinstance(node[key], dict | list) and node[key]]
            if not inner or draw.random() < 0.6:
                break
            node = node[draw.choice(inner)]
        known = SamplingParams.__struct_fields__ + FIELDS
        key = draw.choice([*keys, *known]) if isinstance(node, dict) else draw.choice(keys)
        node[key] = draw.choice(VALUES)(draw)


HEADERS = (
    "X-Request-Id",
    "X-Request-Deadline-Ms",
    "Last-Event-ID",
    "Authorization",
    "Origin",
    "Expect",
    "Content-Encoding",
)
FIELDS = (
    "model", "prompt", "messages", "echo", "suffix", "best_of", "stream", "stream_options", "timeout", "user", "tools",
    "tool_choice", "response_format", "chat_template", "priority", "cache_salt", "logprobs", "top_logprobs", "tokens",
    "structured_outputs", "guided_json", "guided_choice",
)  # fmt: skip
VALUES: tuple[Callable[[random.Random], Any], ...] = (
    lambda draw: None,
    lambda draw: draw.choice((True, False)),
    lambda draw: draw.choice(EDGES),
    lambda draw: draw.choice(FLOATS[:8]),
    lambda draw: draw.choice((math.nan, math.inf, 10**400)),
    lambda draw: draw.choice(TEXTS),
    lambda draw: [],
    lambda draw: {},
    lambda draw: [draw.choice(EDGES) for _ in range(3)],
    lambda draw: [draw.choice(TEXTS) for _ in range(3)],
    lambda draw: {draw.choice(TEXTS): draw.choice(EDGES)},
    lambda draw: [
        {"role": draw.choice(("user", "x", "")), "content": draw.choice((None, "a", [], [{"type": "y"}]))}
    ],
)


def _recorded_bodies() -> list[dict[str, Any]]:
    """Return the requests of the APIs' tests."""
    recorded = [json.loads(path.read_text()) for path in sorted(BODIES.glob("*.json"))]
    bodies = [each["request"] for each in recorded if isinstance(each.get("request"), dict)]
    assert len(bodies) > 20, "the recorded bodies were moved"
    for body in bodies:
        body.pop("model", None)
    return bodies
