"""What is kept of responses in the Responses dialect: the items of conversations, and how each answer ended."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quintet.frontend.api.answer import AnswerWriter
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.responses.events import ResponsesWriter
from quintet.frontend.api.responses.output import COMPLETED, INCOMPLETE, ResponsesAnswer, response_json
from quintet.frontend.api.responses.types import ContentPart, InputItem
from quintet.frontend.response_store import CONVERSATION, ConversationTurn, Record, ResponseStore
from quintet.frontend.service import Service
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import shown

ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{48})_[a-z0-9]{1,12}")
"""Of an item that an answer was made of, or that came without one: it names the response."""
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
KEPT_FIELDS = (
    "role",
    "content",
    "call_id",
    "name",
    "namespace",
    "arguments",
    "input",
    "action",
    "tools",
    "execution",
    "output",
    "summary",
)
"""Of an item, besides its id, type and status."""
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
    """Return how the events of a kept response are written."""
    return _decode_answer(record.answer)


def response_of(record: Record) -> bytes:
    """Return a kept response as JSON, as far as it is."""
    return record.response or response_json(answer_of(record).head, record.status, [])


def asked_of(record: Record) -> list[InputItem]:
    """Return the items that a request brought, or all of a conversation with a name."""
    return _items_decoder.decode(record.items)


def items_of(record: Record) -> list[InputItem]:
    """Return what a response was asked with, and answered."""
    output = msgspec.json.decode(record.response, type=_Output).output if record.response else []
    return [*asked_of(record), *output]


def turn_of(answer: ResponsesAnswer, status: str, response: bytes) -> ConversationTurn | None:
    """Return what a response adds to the conversation that it is a turn of; None where there is none, or no answer."""
    if not answer.conversation or status not in (COMPLETED, INCOMPLETE):
        return None

    def join(record: Record, asked: Record) -> None:
        own = _raw_items_decoder.decode(asked.items)
        add_items(record, [*own, *msgspec.json.decode(response, type=_RawOutput).output])

    return ConversationTurn(answer.conversation, join)


def add_items(record: Record, items: Sequence[msgspec.Raw]) -> None:
    """Append items, which have ids, to a conversation; those that are in it stay where they are."""
    held = _raw_items_decoder.decode(record.items)
    ids = {id_of(item) for item in held}
    record.items = encode_json([*held, *(item for item in items if id_of(item) not in ids)])


def id_of(item: msgspec.Raw) -> str:
    """Return the id of a kept item."""
    return msgspec.json.decode(item, type=_Identified).id


def kept_items(items: Sequence[InputItem], response_id: str) -> list[dict[str, Any]]:
    """Return items as they are kept and listed: each with an id, contents as parts."""
    return [
        _kept_item(item, f"{response_id.partition('_')[2]}_in{index}") for index, item in enumerate(items)
    ]


def _kept_item(item: InputItem, name: str) -> dict[str, Any]:
    kind = item.type or "message"
    kept: dict[str, Any] = {"id": item.id or f"{PREFIXES.get(kind, 'item')}_{name}", "type": kind}
    if kind != "reasoning":
        kept["status"] = item.status or "completed"
    for field in KEPT_FIELDS:
        value = getattr(item, field)
        if value is not None and value is not msgspec.UNSET:
            kept[field] = _parts(value) if isinstance(value, list) else value
    if kind == "message" and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        kept["content"] = _parts([ContentPart(type=part, text=item.content)])
    return kept


def _parts(parts: Sequence[ContentPart]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in msgspec.structs.asdict(part).items() if value is not None}
        | ({"annotations": []} if part.type == "output_text" else {})
        for part in parts
    ]


async def conversation(store: ResponseStore, previous: str | None) -> list[InputItem]:
    """Return the items of the conversation that a response ended. Raises `RequestError` where it is not whole."""
    if previous is None:
        return []
    records = await store.do(lambda file: file.conversation(previous)) if store.keeps else []
    if not records or records[-1].status == CONVERSATION:
        raise parse.invalid(
            f"previous_response_id is {shown(previous)}, which this server does not keep (any more); send all items of the "
            "conversation as input.",
            "previous_response_id",
        )
    if records[0].previous is not None:
        raise parse.invalid(
            f"previous_response_id is {shown(previous)}, which follows {records[0].previous}, and that one is not kept any "
            "more; send all items of the conversation as input.",
            "previous_response_id",
        )
    if records[-1].is_open:
        raise parse.invalid(
            f"previous_response_id is {shown(previous)}, which has not ended; wait for its end.",
            "previous_response_id",
        )
    former = [item for record in records for item in items_of(record)]
    named = answer_of(records[0]).conversation
    if not named:
        return former
    before = await _before_turn(store, named, records[0])
    if before is None:
        raise parse.invalid(
            f"previous_response_id is {shown(previous)}, which goes on with the conversation {named}, and that one does not hold "
            "the turn (any more); send conversation, or all items as input.",
            "previous_response_id",
        )
    return [*before, *former]


async def items_before(store: ResponseStore, record: Record) -> list[InputItem]:
    """Return what comes before a response's own items: of former responses, or in the conversation that it is a turn of.

    That is as it is now: of one that is gone, or has no place for the turn, nothing. Raises `RequestError` where former
    responses are not whole.
    """
    named = answer_of(record).conversation
    if not named:
        return await conversation(store, record.previous)
    return await _before_turn(store, named, record) or []


async def _before_turn(store: ResponseStore, named: str, record: Record) -> list[InputItem] | None:
    """Return what a conversation holds before one of its turns; None where it is gone, or the turn has no place in it."""
    held = await store.do(lambda file: file.find(named))
    if held is None or held.status != CONVERSATION:
        return None
    items = asked_of(held)
    if record.is_open:
        return items
    asked = {item.id for item in asked_of(record)}
    own = asked or {item.id for item in items_of(record)}
    places = [place for place, item in enumerate(items) if item.id in own]
    if not places:
        return None
    end = places[-1] if asked else places[0]
    return [item for item in items[:end] if item.id not in own]


async def resolved(
    store: ResponseStore, items: Sequence[InputItem], former: Sequence[InputItem]
) -> list[InputItem]:
    """Return items with those that they refer to in their place. ``former``: of the conversation so far."""
    known = {item.id: item for item in (*former, *items) if item.type != "item_reference"}
    found: list[InputItem] = []
    for index, item in enumerate(items):
        if item.type != "item_reference":
            found.append(item)
            continue
        match = ITEM_ID.fullmatch(item.id or "")
        if item.id not in known and match is not None and store.keeps:
            response_id = f"resp_{match[1]}"
            record = await store.do(lambda file, wanted=response_id: file.find(wanted))  # type: ignore[misc]
            known |= {each.id: each for each in (items_of(record) if record is not None else [])}
        if item.id not in known:
            raise parse.invalid(
                f"input[{index}] refers to {shown(item.id)}, which this server does not keep (any more); send the item "
                "itself.",
                "input",
            )
        found.append(known[item.id])
    return found


def record_of(
    answer: ResponsesAnswer,
    owner: str,
    status: str,
    items: Sequence[InputItem],
    previous: str | None,
    *,
    background: bool,
    streams: bool,
) -> Record:
    """Return what is kept of a response from its beginning."""
    response_id = answer.options.response_id
    kept = encode_json(kept_items(items, response_id))
    encoded = msgspec.msgpack.encode(answer)
    return Record(response_id, owner, status, background, streams, previous, kept, encoded)


async def keep_end(service: Service, writer: AnswerWriter) -> None:
    """Note how a streamed answer ended, before its client hears of it and goes on with it."""
    assert isinstance(writer, ResponsesWriter)
    if not writer.answer.is_kept or not writer.response:
        return
    response_id, status, response = writer.answer.options.response_id, writer.status, writer.response
    try:
        turn = turn_of(writer.answer, status, response)
        await service.responses.do(
            lambda file: file.finish(response_id, status, response, is_open=False, turn=turn)
        )
    except RequestError:
        _log.exception("response %s could not be kept", response_id)


async def find(service: Service, response_id: str) -> Record:
    """Return a kept response. Raises `RequestError` where there is none of this id."""
    store = service.responses
    record = await store.do(lambda file: file.find(response_id)) if store.keeps else None
    if record is None or record.status == CONVERSATION:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            f"The response {shown(response_id)} is not kept here: it was made with store: false, was deleted, or made room "
            "for others (--response-store-entries, --response-store-size, --response-store-hours).",
            "response_id",
        )
    return record
