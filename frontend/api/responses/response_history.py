"""Stored responses: items of their conversations, and how each response ended."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quintet.frontend.api.answer import AnswerWriter
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.responses.events import ResponsesWriter
from quintet.frontend.api.responses.items import is_reference
from quintet.frontend.api.responses.output import (
    COMPLETED,
    INCOMPLETE,
    PREFIXES,
    ResponsesAnswer,
    response_json,
)
from quintet.frontend.api.responses.types import ContentPart, InputItem
from quintet.frontend.response_store import CONVERSATION, ConversationTurn, Record, ResponseStore
from quintet.frontend.service import Service
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.params import shown

ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{48})_[a-z0-9]{1,12}")
"""Id of an output item, or of an input item that had none; contains the response id."""
STORED_FIELDS = tuple(name for name in InputItem.__struct_fields__ if name not in ("id", "type", "status"))
"""Stored fields of an item, in addition to id, type and status."""
_log = logging.getLogger("quintet")
_items_decoder = msgspec.json.Decoder(list[InputItem])
_decode_answer = msgspec.msgpack.Decoder(ResponsesAnswer).decode


class _Output(msgspec.Struct):
    output: list[InputItem]


class _RawOutput(msgspec.Struct):
    output: list[msgspec.Raw]


class _Identified(msgspec.Struct):
    id: str


_raw_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def answer_of(record: Record) -> ResponsesAnswer:
    """Decode the event format of a stored response."""
    return _decode_answer(record.answer)


def response_of(record: Record) -> bytes:
    """Return a stored response as JSON, in its current state."""
    return record.response or response_json(answer_of(record).head, record.status, [])


def input_of(record: Record) -> list[InputItem]:
    """Return the input items of a response, or all items of a conversation."""
    return _items_decoder.decode(record.items)


def items_of(record: Record) -> list[InputItem]:
    """Return the input and output items of a response."""
    output = msgspec.json.decode(record.response, type=_Output).output if record.response else []
    return [*input_of(record), *output]


def conversation_turn(answer: ResponsesAnswer, status: str, response: bytes) -> ConversationTurn | None:
    """Return the items that a response adds to its conversation; None without a conversation or output."""
    if not answer.conversation or status not in (COMPLETED, INCOMPLETE):
        return None

    def join(record: Record, response_record: Record) -> None:
        own = _raw_items_decoder.decode(response_record.items)
        add_items(record, [*own, *msgspec.json.decode(response, type=_RawOutput).output])

    return ConversationTurn(answer.conversation, join)


def add_items(record: Record, items: Sequence[msgspec.Raw]) -> None:
    """Append items to a conversation; skip those that it already has, by id."""
    held = _raw_items_decoder.decode(record.items)
    ids = {id_of(item) for item in held}
    record.items = encode_json([*held, *(item for item in items if id_of(item) not in ids)])


def id_of(item: msgspec.Raw) -> str:
    return msgspec.json.decode(item, type=_Identified).id


def stored_items(items: Sequence[InputItem], response_id: str) -> list[dict[str, Any]]:
    """Return items in stored form: with ids, and content as parts."""
    return [
        _stored_item(item, f"{response_id.partition('_')[2]}_in{index}") for index, item in enumerate(items)
    ]


def _stored_item(item: InputItem, name: str) -> dict[str, Any]:
    kind = item.type or "message"
    stored: dict[str, Any] = {"id": item.id or f"{PREFIXES.get(kind, 'item')}_{name}", "type": kind}
    if kind != "reasoning":
        stored["status"] = item.status or "completed"
    for field in STORED_FIELDS:
        value = getattr(item, field)
        if value is not None and value is not msgspec.UNSET:
            is_parts = isinstance(value, list) and field in ("content", "summary")
            stored[field] = _parts(value) if is_parts else value
    if kind == "message" and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        stored["content"] = _parts([ContentPart(type=part, text=item.content)])
    return stored


def _parts(parts: Sequence[ContentPart]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in msgspec.structs.asdict(part).items() if value is not None}
        | ({"annotations": []} if part.type == "output_text" else {})
        for part in parts
    ]


async def conversation(store: ResponseStore, previous: str | None) -> list[InputItem]:
    """Return the items of a chain of responses. Raises `RequestError` if a part is missing."""
    if previous is None:
        return []
    records = await store.do(lambda file: file.conversation(previous)) if store.is_enabled else []
    if not records or records[-1].status == CONVERSATION:
        raise invalid(
            f"previous_response_id is {shown(previous)}, which is not stored; send all items of the "
            "conversation as input.",
            "previous_response_id",
        )
    if records[0].previous is not None:
        raise invalid(
            f"previous_response_id is {shown(previous)}, which follows {records[0].previous}, which is no longer stored; "
            "send all items of the conversation as input.",
            "previous_response_id",
        )
    if records[-1].is_open:
        raise invalid(
            f"previous_response_id is {shown(previous)}, which has not ended; wait for its end.",
            "previous_response_id",
        )
    former = [item for record in records for item in items_of(record)]
    named = answer_of(records[0]).conversation
    if not named:
        return former
    before = await _before_turn(store, named, records[0])
    if before is None:
        raise invalid(
            f"previous_response_id is {shown(previous)}, a turn of the conversation {named} that is no longer in it; "
            "send conversation, or all items as input.",
            "previous_response_id",
        )
    return [*before, *former]


async def items_before(store: ResponseStore, record: Record) -> list[InputItem]:
    """Return the items before a response's own: of previous responses, or of its conversation.

    A conversation is read in its current state; empty if it or the turn was deleted. Raises `RequestError` if a previous
    response is missing.
    """
    named = answer_of(record).conversation
    if not named:
        return await conversation(store, record.previous)
    return await _before_turn(store, named, record) or []


async def _before_turn(store: ResponseStore, named: str, record: Record) -> list[InputItem] | None:
    """Return a conversation's items before one of its turns; None if it or the turn was deleted."""
    held = await store.do(lambda file: file.find(named))
    if held is None or held.status != CONVERSATION:
        return None
    items = input_of(held)
    if record.is_open:
        return items
    input_ids = {item.id for item in input_of(record)}
    own = input_ids or {item.id for item in items_of(record)}
    places = [place for place, item in enumerate(items) if item.id in own]
    if not places:
        return None
    end = places[-1] if input_ids else places[0]
    return [item for item in items[:end] if item.id not in own]


async def resolved(
    store: ResponseStore, items: Sequence[InputItem], former: Sequence[InputItem]
) -> list[InputItem]:
    """Replace item references by the items. ``former``: items of the conversation so far."""
    known = {item.id: item for item in (*former, *items) if not is_reference(item)}
    found: list[InputItem] = []
    for index, item in enumerate(items):
        if not is_reference(item):
            found.append(item)
            continue
        match = ITEM_ID.fullmatch(item.id or "")
        if item.id not in known and match is not None and store.is_enabled:
            response_id = f"resp_{match[1]}"
            record = await store.do(lambda file, wanted=response_id: file.find(wanted))  # type: ignore[misc]
            known |= {each.id: each for each in (items_of(record) if record is not None else [])}
        if item.id not in known:
            raise invalid(
                f"input[{index}] refers to {shown(item.id)}, which is not stored; send the item itself.",
                "input",
            )
        found.append(known[item.id])
    return found


async def store_end(service: Service, writer: AnswerWriter) -> None:
    """Store the end of a streamed response before the client receives it, so that the client can refer to it."""
    assert isinstance(writer, ResponsesWriter)
    if not writer.answer.is_stored or not writer.response:
        return
    response_id, status, response = writer.answer.options.response_id, writer.status, writer.response
    try:
        turn = conversation_turn(writer.answer, status, response)
        await service.responses.do(
            lambda file: file.finish(response_id, status, response, is_open=False, turn=turn)
        )
    except RequestError:
        _log.exception("response %s could not be stored", response_id)


async def find(service: Service, response_id: str) -> Record:
    """Return a stored response. Raises `RequestError` if it does not exist."""
    store = service.responses
    record = await store.do(lambda file: file.find(response_id)) if store.is_enabled else None
    if record is None or record.status == CONVERSATION:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            f"The response {shown(response_id)} is not stored: it was made with store: false, was deleted, or evicted "
            "(--response-store-entries, --response-store-size, --response-store-hours).",
            "response_id",
        )
    return record
