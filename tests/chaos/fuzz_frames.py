"""Random and mutated frames for every inbox of a server, with and without its key."""

from __future__ import annotations

import math
import random
import struct
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from quintet.deploy.tools.replay.compare import COLUMNS
from quintet.process.sockets import HMAC_BYTES, FrameHmac, run_key
from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire import supervision
from quintet.wire.ids import Role, WorkerId
from quintet.wire.params import SamplingParams

from ..processes.server import Server

ACCEPTED: dict[Role, tuple[type[msgspec.Struct], ...]] = {
    Role.SUPERVISOR: (
        supervision.Ready,
        supervision.Heartbeat,
        supervision.MetricsQuery,
        supervision.Command,
    ),
    Role.TOKENIZER: (m.Submit, m.Cancel, m.InFlightReport, m.TokenizeQuery),
    Role.CORE: (m.Admit, m.Cancel, m.StopHit, m.Resume, m.Live, m.InFlightReport, s.StepResult),
    Role.EXECUTOR: (s.StepPlan,),
    Role.DETOKENIZER: (m.Tokens, m.DetokenizeQuery, m.Live),
    Role.FRONTEND: (
        m.Text,
        m.Failed,
        m.Tokenized,
        m.Detokenized,
        m.Resumed,
        m.Unknown,
        supervision.MetricsReport,
    ),
}
"""Messages that each role accepts, without orders."""

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
    """Generator of decodable messages, by the types of their fields."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def message(self, kind: type[msgspec.Struct]) -> bytes:
        """Return an encoded message of this kind; most fields have plausible values."""
        return msgspec.msgpack.encode(self._struct(kind))

    def _struct(self, kind: type[msgspec.Struct]) -> msgspec.Struct:
        if kind is m.Live:  # of a dead process: a valid `Live` drops all requests that it does not list
            count = self._draw.choice((0, 1, 5))
            return m.Live(WorkerId(Role.CORE, 0, 0), self._draw.randbytes(8 * count))
        hints = typing.get_type_hints(kind)
        columns = COLUMNS.get(kind, {})
        rows = self._draw.choice((0, 1, 2, 5))
        values = {}
        for name in kind.__struct_fields__:
            if name in columns and self._draw.random() < 0.95:
                values[name] = self._column(columns[name], rows)
            elif name == "params":
                values[name] = self._params()
            elif name.endswith("_epoch") or name == "topology":
                values[name] = self._draw.randrange(2)
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
    """Sender of frames to all inboxes of a server."""

    def __init__(self, server: Server, draw: random.Random) -> None:
        self._draw = draw
        self._frames = Frames(draw)
        inboxes = _inboxes(server)
        self._hmac = FrameHmac(run_key(next(iter(inboxes)).parent))
        self._other_hmac = FrameHmac(draw.randbytes(32))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._targets: list[tuple[zmq.Socket[bytes], tuple[type[msgspec.Struct], ...]]] = []
        for path in inboxes:
            outbox = self._context.socket(zmq.PUSH)
            outbox.connect(f"ipc://{path}")
            self._targets.append((outbox, ACCEPTED[Role(path.name.rpartition("-")[0])]))

    def send(self) -> None:
        """Send one frame to a random inbox."""
        draw = self._draw
        outbox, kinds = draw.choice(self._targets)
        payload = self._frames.message(draw.choice(kinds))
        match draw.randrange(8):
            case 0:
                frame = draw.randbytes(draw.choice((0, 1, HMAC_BYTES, 200)))
            case 1:
                frame = payload
            case 2:
                frame = self._other_hmac.sign(payload)
            case 3:
                frame = self._hmac.sign(draw.randbytes(draw.choice((0, 1, 200))))
            case 4:
                frame = self._hmac.sign(self._frames.mutated(payload))
            case _:
                frame = self._hmac.sign(payload)
        outbox.send(frame)

    def close(self) -> None:
        """Flush and close the sockets."""
        for outbox, _ in self._targets:
            outbox.close(linger=1000)
        self._context.term()


def _inboxes(server: Server) -> list[Path]:
    """Return the Unix sockets that the server's processes have bound."""
    found = set()
    processes = [psutil.Process(server.process.pid), *server.children().values()]
    for process in processes:
        for connection in process.net_connections("unix"):
            path = Path(str(connection.laddr))
            if path.parent.name.startswith("quintet-") and path.name.rpartition("-")[0] in list(Role):
                found.add(path)
    roles = {path.name.rpartition("-")[0] for path in found}
    assert roles == {str(role) for role in Role}, f"only found inboxes of {roles}"
    return sorted(found)
