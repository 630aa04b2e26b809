"""What stands in the place of a message that an inbox dropped: whose requests and questions it carried.

Whoever drops a request's message ends the request. So a receiver hears of what it did not get, in its turn among the
others; nothing else of such a message is passed on, and what is, was checked here. Only of frames that were sealed with the
server's key: of a forged one nothing can be believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire.codec import UNREADABLE, unpack_i64
from quintet.wire.columns import REQUEST_BYTES
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role
from quintet.wire.kv_admin import KvReport

MAX_ID = 1 << 63

CARRIERS: Mapping[type[msgspec.Struct], tuple[str, ...]] = {
    m.Submit: ("request_id",),
    m.Admit: ("request_id",),
    m.Failed: ("request_id",),
    m.Cancel: ("request_ids",),
    m.Tokens: ("request_ids", "opens"),
    m.Text: ("request_ids", "started", "finishes"),
    m.TokenizeQuery: (),
    m.DetokenizeQuery: (),
    m.Tokenized: (),
    m.Detokenized: (),
    m.Reclaimed: (),
    KvReport: (),
    s.StepPlan: (),
    s.StepResult: (),
    s.Capacity: (),
}
"""Messages for whose loss somebody would wait, and the fields that name their requests. Accounts are given again, and a
`m.StopHit` that is lost leaves a request for which nobody waits, which they find; a `m.Reclaim` is asked again by its client, a
`quintet.wire.kv_admin.KvQuery` by who operates the server."""

_BY_TAG = {str(kind.__struct_config__.tag): kind for kind in CARRIERS}


class Dropped(msgspec.Struct, array_like=True, tag="dropped"):
    """In its place among what a process received: a message was dropped that carried something."""

    kind: str
    """Its tag."""
    request_ids: list[int] = []
    query_id: int | None = None
    frontend: int | None = None
    """Who asked, where it is a question."""
    step: int | None = None
    tables: int = 0
    """As in `s.StepPlan`."""

    def error(self, receiver: Role) -> RequestError:
        """Return what the clients of its requests are told."""
        return RequestError(
            ErrorCode.INTERNAL,
            f"The request was lost inside the server: the {receiver} was sent a message ({self.kind}) with lengths or "
            "numbers that cannot be, and dropped it. Nothing more of the request is computed. This is a fault of the "
            "server: please report it with the server's log.",
        )


def carried_by(message: msgspec.Struct) -> Dropped | None:
    """Return what a message carried that made no sense; None for one that nobody waits for."""
    kind = type(message)
    return _dropped(kind, lambda name: getattr(message, name)) if kind in CARRIERS else None


def carried_by_bytes(payload: bytes | memoryview, accepted: Iterable[type[msgspec.Struct]]) -> Dropped | None:
    """Return what a message carried that could not be decoded, as far as its first fields can; None if it is none of these."""
    try:
        raw = msgspec.msgpack.decode(payload)
    except UNREADABLE:
        return None
    if not isinstance(raw, list) or not raw or not isinstance(raw[0], str):
        return None
    kind = _BY_TAG.get(raw[0])
    if kind is None or kind not in accepted:
        return None
    return _dropped(kind, dict(zip(kind.__struct_fields__, raw[1:], strict=False)).get)


def _dropped(kind: type[msgspec.Struct], field: Callable[[str], Any]) -> Dropped | None:
    ids = [each for name in CARRIERS[kind] for each in _ids_in(field(name))]
    fields = kind.__struct_fields__

    def number(name: str) -> int | None:
        value = field(name) if name in fields else None
        return value if _is_id(value) else None

    query_id, step = (
        number("query_id"),
        number("step") if issubclass(kind, s.StepPlan | s.StepResult) else None,
    )
    if not ids and query_id is None and step is None and kind is not s.Capacity:
        return None
    return Dropped(
        str(kind.__struct_config__.tag),
        list(dict.fromkeys(ids)),
        query_id,
        number("frontend"),
        step,
        number("tables") or 0,
    )


def _ids_in(value: object) -> list[int]:
    """Return the request ids in a field: a number, a list of them, a column, or a list of structs that begin with theirs."""
    match value:
        case bytes():
            return list(filter(_is_id, unpack_i64(value))) if not len(value) % REQUEST_BYTES else []
        case list():
            return [request_id for each in value for request_id in _ids_in(_first_of(each))]
        case _:
            return [value] if _is_id(value) else []  # type: ignore[list-item]


def _first_of(item: object) -> object:
    match item:
        case msgspec.Struct():
            return getattr(item, "request_id", None)
        case [int() as first, *_]:
            return first
        case int():
            return item
        case _:
            return None


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_ID
