"""Notices of dropped messages: enough to end the affected requests, and nothing unvalidated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quintet.process.sockets import Bus, FrameHmac, Inbox, Peers, Rejection, address_of
from quintet.wire import codec, kv_admin
from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire.codec import pack_i32, pack_i64
from quintet.wire.dropped import CARRIERS, Dropped, carried_by, carried_by_bytes
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_admin import KvReport
from quintet.wire.pooling import Pooled
from quintet.wire.request import Echo
from quintet.wire.validate import Validator
from tests.wire.test_validate import admit, plan, result, submit, text, tokens

from .test_record import config_of

CORE = WorkerId(Role.CORE, 0, 1)
OPEN = m.Open(7, 1, 0, b"", [], False, True, True, Echo.NONE, False, 0, 0, 0)

CARRIED: list[tuple[msgspec.Struct, Dropped]] = [
    (submit(request_id=5), Dropped("submit", [5])),
    (admit(request_id=5, prompt_ids=pack_i32([9])), Dropped("admit", [5])),
    (m.Cancel([5, -1, 1 << 70, 6], 0), Dropped("cancel", [5, 6])),
    (m.Failed(5, m.ErrorCode.INVALID, ""), Dropped("failed", [5])),
    (Pooled(5, 1, 0, 0, b"odd"), Dropped("pooled", [5])),
    (tokens(opens=[OPEN], request_ids=pack_i64([9, -4, 7])), Dropped("tokens", [9, 7])),
    (tokens(opens=[OPEN], request_ids=b"odd"), Dropped("tokens", [7])),
    (
        text(started=[m.Started(3, 1, 0, 0, 0)], finishes=[m.Finish(4, m.FinishReason.STOP, None, 1)]),
        Dropped("text_out", [9, 3, 4]),
    ),
    (m.TokenizeQuery(8, 3, m.TextPrompt("")), Dropped("tokenize", query_id=8, frontend=3)),
    (m.DetokenizeQuery(8, 3, b"x"), Dropped("detokenize", query_id=8, frontend=3)),
    (m.Tokenized(8, b"x"), Dropped("tokenized", query_id=8)),
    (m.Detokenized(8, ""), Dropped("detokenized", query_id=8)),
    (m.Resumed(8, None), Dropped("resumed", query_id=8)),
    (KvReport(8, 0), Dropped("kv_report", query_id=8)),
    (plan(step=4, tables_epoch=2), Dropped("plan", step=4, tables_epoch=2)),
    (result(step=4), Dropped("result", step=4)),
    (s.Capacity(1, 0, 4, 8, 128, tables_epoch=3), Dropped("capacity", tables_epoch=3)),
]


@pytest.mark.parametrize(("message", "expected"), CARRIED, ids=lambda each: type(each).__name__)
def test_ids_of_a_dropped_message(message: Any, expected: Dropped) -> None:
    assert carried_by(message) == expected
    if any(not -(1 << 63) <= each < 1 << 64 for each in getattr(message, "request_ids", [])):
        message.request_ids = expected.request_ids  # beyond the range of a frame
    raw = codec.encode(message)
    assert carried_by_bytes(raw, CARRIERS) == expected
    assert carried_by_bytes(raw, [m.Live]) is None, "no process waits for a message of another receiver"


def test_every_kind_with_request_ids_is_known_or_excluded() -> None:
    """A new message kind that carries requests must be added here."""
    naming = {
        kind
        for module in (m, s, kv_admin)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
        and kind.__struct_config__.tag is not None
        and {"request_id", "request_ids", "query_id", "step"}.intersection(kind.__struct_fields__)
    }
    assert naming - set(CARRIERS) == {
        m.StopHit,
        m.Live,
        m.InFlightReport,
        m.Unknown,
        m.Resume,
        kv_admin.KvQuery,
    }
    assert {type(message) for message, _ in CARRIED} == set(CARRIERS)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        codec.encode(m.Cancel([5], 0))[:-1],
        msgspec.msgpack.encode({"submit": 5}),
        msgspec.msgpack.encode(["submit"]),
        msgspec.msgpack.encode(["submit", "five"]),
        msgspec.msgpack.encode(["submit", True]),
        msgspec.msgpack.encode(["submit", -5]),
        msgspec.msgpack.encode(["cancel", [[], [[]], "x", None, 1.0]]),
        msgspec.msgpack.encode([["submit"], 5]),
        b"\x91" * 100_000,
    ],
)
def test_random_bytes_give_no_notice(payload: bytes) -> None:
    assert carried_by_bytes(payload, CARRIERS) is None


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    bus = Bus(tmp_path)
    yield bus
    bus.context.destroy(linger=0)


def test_notice_is_in_message_order_and_recorded(bus: Bus, tmp_path: Path) -> None:
    seen: list[bytes] = []
    accepts: Any = m.Admit | m.Cancel
    inbox: Inbox[Any] = Inbox(
        bus,
        address_of(tmp_path, CORE),
        accepts,
        is_valid=Validator(config_of(tmp_path)).accepts,
        tap=lambda payload: seen.append(bytes(payload)),
    )
    peers = Peers(bus)
    peers.connect(CORE, inbox.address)
    before, after = m.Cancel([1], 0), m.Cancel([2], 0)
    untyped = msgspec.msgpack.encode(["admit", 6, "no bytes"])
    peers.send(Role.CORE, 0, before)
    peers.send(Role.CORE, 0, admit(request_id=5, prompt_ids=pack_i32([9])))
    peers.send_payload(Role.CORE, 0, untyped)
    peers.send_payload(Role.CORE, 0, codec.encode(Dropped("admit", [1])))
    peers.send(Role.CORE, 0, after)
    foreign_socket = bus.context.socket(zmq.PUSH)
    foreign_socket.connect(inbox.address)
    foreign_socket.send(FrameHmac(bytes(32)).sign(untyped))
    messages: list[Any] = []
    while after not in messages or not inbox.rejected[Rejection.FORGED]:
        messages += inbox.wait(1.0)
    wanted = [before, Dropped("admit", [5]), Dropped("admit", [6]), after]
    assert messages == wanted
    assert seen == [codec.encode(message) for message in wanted]
    assert inbox.rejected == {Rejection.FORGED: 1, Rejection.UNREADABLE: 2, Rejection.INVALID: 1}
    foreign_socket.close(linger=0)
    peers.close()
    inbox.close()


def test_error_names_the_cause() -> None:
    error = Dropped("admit", [5]).error(Role.CORE)
    assert (error.code, error.param) == (m.ErrorCode.INTERNAL, None)
    assert "the core received a message (admit)" in error.message and "bug of the server" in error.message
