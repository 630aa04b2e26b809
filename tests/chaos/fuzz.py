"""Random and mutated bytes for every inbox and every route of a running server.

    python -m tests.chaos.fuzz --seconds 600 --seed 7      a longer run than the test's, of a server of its own

Frames come from one who has not the server's key, and from one who has it and sends nonsense. What is *not* sent: orders
that would be obeyed (`Stop`, `Drain`, a believable `Topology` or `Capacity`), for who has the key may give them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import struct
import time
import types
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import zmq

from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire.columns import COLUMNS
from quintet.wire.ids import Role
from quintet.wire.params import SamplingParams
from quintet.wire.seal import SEAL_BYTES, Seal, run_key

from ..processes.server import Server, serve

BODIES = Path(__file__).parents[1] / "dialects" / "bodies"
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/x", "/health",
    "/livez", "/readyz", "/ping", "/version", "/load", "/metrics", "/openapi.json", "/docs", "/", "/nothing/here",
    "/v1/streams/abc", "/v1/streams/abc?from=1",
)  # fmt: skip
ALLOWED_5XX = {501, 503}
ANSWER_S = 1.0
"""A request that takes longer is left: its client goes away."""

HEARD: dict[Role, tuple[type[msgspec.Struct], ...]] = {
    Role.SUPERVISOR: (m.Ready, m.Heartbeat, m.MetricsQuery),
    Role.TOKENIZER: (m.Submit, m.Cancel, m.TokenizeQuery),
    Role.CORE: (m.Admit, m.Cancel, m.StopHit, m.Reclaim, m.Live, s.StepResult),
    Role.EXECUTOR: (s.StepPlan,),
    Role.DETOKENIZER: (m.Tokens, m.DetokenizeQuery, m.Live),
    Role.FRONTEND: (m.Text, m.Failed, m.Tokenized, m.Detokenized, m.Reclaimed, m.Unknown, m.MetricsReport),
}
"""What each role may be told and is not an order."""

EDGES = (
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    1 << 31,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
)
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 1e308, -1e308, math.inf, -math.inf, math.nan, 5e-324)
TEXTS = (
    "",
    "a",
    "\0",
    "\ud800",
    "é" * 50,
    "\N{GRINNING FACE}",
    "x" * 5000,
    "{{ 1/0 }}",
    "%s",
    "../../etc/passwd",
)


class Frames:
    """Draws messages that can be decoded, by the types of their fields."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def message(self, kind: type[msgspec.Struct]) -> bytes:
        """Return an encoded message of this kind, of which some fields are likely and others are not."""
        return msgspec.msgpack.encode(self._struct(kind))

    def _struct(self, kind: type[msgspec.Struct]) -> msgspec.Struct:
        hints = typing.get_type_hints(kind)
        columns = COLUMNS.get(kind, {})
        rows = self._draw.choice((0, 1, 2, 5))
        values = {}
        for name in kind.__struct_fields__:
            if name in columns and self._draw.random() < 0.95:
                values[name] = self._column(columns[name], rows)
            elif name == "params":
                values[name] = self._params()
            elif hints[name] is int and name.endswith(("_id", "_ns")):
                values[name] = self._draw.getrandbits(63)
            else:
                values[name] = self._value(hints[name])
        return kind(**values)

    def _params(self) -> SamplingParams:
        params = SamplingParams(seed=1)
        if self._draw.random() < 0.5:
            name = self._draw.choice(SamplingParams.__struct_fields__)
            setattr(params, name, self._value(typing.get_type_hints(SamplingParams)[name]))
        return params

    def _column(self, code: str, rows: int) -> bytes:
        size = struct.calcsize(code)
        if self._draw.random() < 0.1:
            return self._draw.randbytes(self._draw.randrange(40))
        if code == "B":
            return bytes(self._draw.choice((0, 1, 1, 2, 9)) for _ in range(rows))
        if self._draw.random() < 0.2:
            return self._draw.randbytes(rows * size)
        return b"".join(self._draw.randrange(60).to_bytes(size, "little") for _ in range(rows))

    def _value(self, hint: Any) -> Any:
        draw = self._draw
        origin, of = typing.get_origin(hint), typing.get_args(hint)
        if origin is types.UnionType or origin is typing.Union:
            return self._value(draw.choice(of))
        if origin is list:
            return [self._value(of[0]) for _ in range(draw.choice((0, 1, 3)))]
        if origin is dict:
            return {self._value(of[0]): self._value(of[1]) for _ in range(draw.choice((0, 2)))}
        if origin is tuple:
            return tuple(self._value(each) for each in of)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self._struct(hint)
        if hint is bool:
            return draw.random() < 0.5
        if isinstance(hint, type) and issubclass(hint, str) and hint is not str:
            return draw.choice(list(hint))  # type: ignore[call-overload]
        if isinstance(hint, type) and issubclass(hint, int):
            return draw.choice(EDGES) if hint is int and draw.random() < 0.4 else draw.randrange(4)
        if hint is float:
            return draw.choice(FLOATS)
        if hint is bytes:
            return draw.randbytes(draw.choice((0, 1, 4, 8, 33)))
        if hint is str:
            return draw.choice(TEXTS[:3] + TEXTS[4:])  # lone surrogates cannot be encoded
        return None

    def mutated(self, payload: bytes) -> bytes:
        """Return the payload with a few of its bytes changed, removed, repeated or added."""
        changed, draw = bytearray(payload), self._draw
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(len(changed) + 1)
            match draw.randrange(5):
                case 0 if changed:
                    changed[at % len(changed)] = draw.randrange(256)
                case 1:
                    del changed[at : at + draw.randrange(1, 9)]
                case 2:
                    changed[at:at] = draw.randbytes(draw.randrange(1, 9))
                case 3:
                    changed[at:at] = changed[at : at + draw.randrange(1, 65)]
                case _:
                    del changed[at:]
        return bytes(changed)


class BusFuzz:
    """Sends to every inbox of a server."""

    def __init__(self, server: Server, draw: random.Random) -> None:
        self._draw = draw
        self._frames = Frames(draw)
        inboxes = _inboxes(server)
        self._seal = Seal(run_key(next(iter(inboxes)).parent))
        self._stranger = Seal(draw.randbytes(32))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._targets: list[tuple[zmq.Socket[bytes], tuple[type[msgspec.Struct], ...]]] = []
        for path in inboxes:
            outbox = self._context.socket(zmq.PUSH)
            outbox.connect(f"ipc://{path}")
            self._targets.append((outbox, HEARD[Role(path.name.rpartition("-")[0])]))

    def send(self) -> None:
        """Send one frame to somebody."""
        draw = self._draw
        outbox, kinds = draw.choice(self._targets)
        payload = self._frames.message(draw.choice(kinds))
        match draw.randrange(8):
            case 0:
                frame = draw.randbytes(draw.choice((0, 1, SEAL_BYTES, 200)))
            case 1:
                frame = payload
            case 2:
                frame = self._stranger.close(payload)
            case 3:
                frame = self._seal.close(draw.randbytes(draw.choice((0, 1, 200))))
            case 4:
                frame = self._seal.close(self._frames.mutated(payload))
            case _:
                frame = self._seal.close(payload)
        outbox.send(frame)

    def close(self) -> None:
        """Let the last frames leave."""
        for outbox, _ in self._targets:
            outbox.close(linger=1000)
        self._context.term()


def _inboxes(server: Server) -> list[Path]:
    """Return the sockets that the server's processes have bound, from the system's own tables."""
    found = set()
    everybody = [psutil.Process(server.process.pid), *server.children().values()]
    for process in everybody:
        for connection in process.net_connections("unix"):
            path = Path(str(connection.laddr))
            if path.parent.name.startswith("quintet-") and path.name.rpartition("-")[0] in list(Role):
                found.add(path)
    roles = {path.name.rpartition("-")[0] for path in found}
    assert roles == {str(role) for role in Role}, f"only found inboxes of {roles}"
    return sorted(found)


class HttpFuzz:
    """Sends to every route of a server, and looks at the statuses that come back."""

    def __init__(self, server: Server, draw: random.Random) -> None:
        parts = urlsplit(server.url)
        assert parts.hostname is not None and parts.port is not None
        self._address = (parts.hostname, parts.port)
        self._draw = draw
        self._bodies = _real_bodies()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[tuple[int, bytes]] = []
        """Statuses that no request may cause, and the requests."""

    def send(self) -> None:
        """Send one request, or what looks like one, and read the first line of the answer."""
        request = self._draw.choice((self._broken, self._framed, self._framed, self._typed, self._typed))()
        with socket.create_connection(self._address, ANSWER_S) as connection:
            try:
                connection.sendall(request)
                if self._draw.random() < 0.3:
                    connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
            except (TimeoutError, ConnectionError):
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
        """Heads that are none."""
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
        """Bodies whose lengths or chunks are wrong, or that are no JSON."""
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
        """Real bodies in which one or two values are of another type or size."""
        draw = self._draw
        body = json.loads(json.dumps(draw.choice(self._bodies)))
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        path = draw.choice((path, path, path, "/tokenize", "/detokenize"))
        for _ in range(draw.choice((1, 1, 2))):
            self._spoil(body)
        body["max_tokens"] = body.get("max_tokens", 4) if draw.random() < 0.5 else 4
        words = json.dumps(body).encode()
        fields = [f"Content-Length: {len(words)}", "Content-Type: application/json"]
        if draw.random() < 0.2:
            fields.append(f"{draw.choice(HEADERS)}: {draw.choice(('', '-1', 'nan', 'x' * 300, '9' * 30))}")
        return self._head(path, *fields) + words

    def _spoil(self, body: Any) -> None:
        """Replace a value somewhere inside, or add a field that requests may have."""
        draw, place = self._draw, body
        while True:
            keys: Sequence[Any] = list(place) if isinstance(place, dict) else range(len(place))
            inner = [key for key in keys if isinstance(place[key], dict | list) and place[key]]
            if not inner or draw.random() < 0.6:
                break
            place = place[draw.choice(inner)]
        known = SamplingParams.__struct_fields__ + FIELDS
        key = draw.choice([*keys, *known]) if isinstance(place, dict) else draw.choice(keys)
        place[key] = draw.choice(VALUES)(draw)


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


def _real_bodies() -> list[dict[str, Any]]:
    """Return the requests of the dialects' own tests."""
    told = [json.loads(path.read_text()) for path in sorted(BODIES.glob("*.json"))]
    bodies = [each["request"] for each in told if isinstance(each.get("request"), dict)]
    assert len(bodies) > 20, "the real bodies have moved"
    for body in bodies:
        body.pop("model", None)
    return bodies


def storm(server: Server, seconds: float, seed: int, *, frames_at_once: int = 20) -> HttpFuzz:
    """Send to everything for a while; return what HTTP answered."""
    draw = random.Random(seed)
    bus, web = BusFuzz(server, draw), HttpFuzz(server, draw)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            for _ in range(frames_at_once):
                bus.send()
            try:
                web.send()
            except ConnectionRefusedError:
                raise AssertionError(
                    "the server has closed its port:\n" + "\n".join(server.lines[-60:])
                ) from None
    finally:
        bus.close()
    return web


def main() -> None:
    """Storm a server of one's own and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with serve("--executor", "mock", "--drain-timeout", "3") as server:
        before = {name: child.pid for name, child in server.children().items()}
        web = storm(server, arguments.seconds, arguments.seed)
        after = {name: child.pid for name, child in server.children().items()}
        print("statuses", dict(sorted(web.statuses.items())))
        for status, request in web.wrong[:20]:
            print(status, request[:2000])
        print("no process died" if before == after else f"died: {before} {after}")
        print("\n".join(server.lines[-40:]), flush=True)


if __name__ == "__main__":
    main()
