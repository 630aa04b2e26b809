"""Notification of a message that an inbox dropped: the requests and queries it carried.

The receiver gets it in the order of messages and ends those requests. Only validated fields of the message are passed
on, and only of frames with a valid HMAC: a forged frame is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire.codec import REQUEST_BYTES, UNREADABLE, unpack_i64
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import MAX_ID, Role
from quintet.wire.kv_admin import KvReport
from quintet.wire.pooling import Pooled

CARRIERS: Mapping[type[msgspec.Struct], tuple[str, ...]] = {
    m.Submit: ("request_id",),
    m.Admit: ("request_id",),
    m.Failed: ("request_id",),
    Pooled: ("request_id",),
    m.Cancel: ("request_ids",),
    m.Tokens: ("request_ids", "opens"),
    m.Text: ("request_ids", "started", "finishes"),
    m.TokenizeQuery: (),
    m.DetokenizeQuery: (),
    m.Tokenized: (),
    m.Detokenized: (),
    m.Resumed: (),
    KvReport: (),
    s.StepPlan: (),
    s.StepResult: (),
    s.Capacity: (),
}
"""Messages that another process waits for, and the fields with their request ids.

Reports are sent again periodically. A lost `m.StopHit` leaves a request that reconciliation finds. A `m.Resume` is
retried by its client, a `quintet.wire.kv_admin.KvQuery` by the operator.
"""

_BY_TAG = {str(kind.__struct_config__.tag): kind for kind in CARRIERS}


class Dropped(msgspec.Struct, array_like=True, tag="dropped"):
    """A message with requests or queries was dropped; takes its place in the order of received messages."""

    kind: str
    """The message's tag."""
    request_ids: list[int] = []
    query_id: int | None = None
    frontend: int | None = None
    """Index of the querying frontend, for a query."""
    step: int | None = None
    tables_epoch: int = 0
    """As in `s.StepPlan`."""

    def error(self, receiver: Role) -> RequestError:
        """Return the error for the clients of its requests."""
        return RequestError(
            ErrorCode.INTERNAL,
            f"The request was lost inside the server: the {receiver} received a message ({self.kind}) with invalid lengths or "
            "numbers, and dropped it. The request has ended. This is a bug of the "
            "server: retry the request, and report it with the server's log.",
        )


def carried_by(message: msgspec.Struct) -> Dropped | None:
    """Return the requests and queries of an invalid message; None for a kind that no process waits for."""
    kind = type(message)
    return _dropped(kind, lambda name: getattr(message, name)) if kind in CARRIERS else None


def carried_by_bytes(payload: bytes | memoryview, accepted: Iterable[type[msgspec.Struct]]) -> Dropped | None:
    """Return those of a message that could not be decoded, from its leading fields; None for other kinds."""
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

    query_id = number("query_id")
    step = number("step") if issubclass(kind, s.StepPlan | s.StepResult) else None
    if not ids and query_id is None and step is None and kind is not s.Capacity:
        return None
    return Dropped(
        str(kind.__struct_config__.tag),
        list(dict.fromkeys(ids)),
        query_id,
        number("frontend"),
        step,
        number("tables_epoch") or 0,
    )


def _ids_in(value: object) -> list[int]:
    """Return the request ids in a field: a number, a list, a column, or a list of structs with an id as first field."""
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
