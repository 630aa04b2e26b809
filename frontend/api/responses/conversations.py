"""/v1/conversations: stored items under an id, to which responses append their turns.

Conversations are stored and evicted together with responses. A turn is appended in the transaction that stores the
response's end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.responses.items import messages_of
from quintet.frontend.api.responses.parse import check_metadata
from quintet.frontend.api.responses.response_history import add_items, id_of, input_of, stored_items
from quintet.frontend.api.responses.stored import page_of
from quintet.frontend.api.responses.types import (
    ConversationBody,
    ConversationChange,
    InputItem,
    ItemsBody,
)
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.response_store import CONVERSATION, Record, ResponseStore
from quintet.frontend.service import Service
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.params import shown

ID_BYTES = 24
_decoder = msgspec.json.Decoder(ConversationBody)
_change_decoder = msgspec.json.Decoder(ConversationChange)
_items_decoder = msgspec.json.Decoder(ItemsBody)
_raw_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])


async def conversations(service: Service, http_request: HttpRequest) -> None:
    """POST /v1/conversations."""
    body = parse.decode(await http_request.read_json_body(service.bodies), _decoder)
    check_metadata(body.metadata or {})
    items = encode_json(_named(body.items or []))
    if not service.responses.is_enabled:
        raise invalid("This server stores no conversations (--response-store-entries 0).")
    head = {
        "id": f"conv_{secrets.token_hex(ID_BYTES)}",
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": body.metadata or {},
    }
    record = Record(str(head["id"]), "", CONVERSATION, False, False, None, items, encode_json(head))
    await service.responses.do(lambda file: file.insert(record))
    await http_request.respond(200, record.answer)


async def conversation(service: Service, http_request: HttpRequest) -> None:
    """GET, POST (new metadata) or DELETE /v1/conversations/{id}."""
    record = await _find(service.responses, http_request.path_params["id"])
    if http_request.method == "DELETE":
        await service.responses.do(lambda file: file.delete(record.id))
        await http_request.respond_json({"id": record.id, "object": "conversation.deleted", "deleted": True})
        return
    if http_request.method == "POST":
        body = parse.decode(await http_request.read_json_body(service.bodies), _change_decoder)
        metadata = body.metadata or {}
        check_metadata(metadata)

        def change(record: Record) -> None:
            record.answer = encode_json({**msgspec.json.decode(record.answer), "metadata": metadata})

        record = _existing(
            await service.responses.do(lambda file: file.rewrite(record.id, change)), record.id
        )
    await http_request.respond(200, record.answer)


async def items(service: Service, http_request: HttpRequest) -> None:
    """GET (one page) or POST (append) /v1/conversations/{id}/items."""
    record = await _find(service.responses, http_request.path_params["id"])
    if http_request.method != "POST":
        await http_request.respond_json(page_of(http_request, msgspec.json.decode(record.items)))
        return
    body = parse.decode(await http_request.read_json_body(service.bodies), _items_decoder)
    new = _named(body.items)
    raw = _raw_items_decoder.decode(encode_json(new))
    _existing(
        await service.responses.do(lambda file: file.rewrite(record.id, lambda held: add_items(held, raw))),
        record.id,
    )
    ends = {"first_id": new[0]["id"] if new else None, "last_id": new[-1]["id"] if new else None}
    await http_request.respond_json({"object": "list", "data": new, **ends, "has_more": False})


async def item(service: Service, http_request: HttpRequest) -> None:
    """GET or DELETE /v1/conversations/{id}/items/{item_id}."""
    record = await _find(service.responses, http_request.path_params["id"])
    item_id = http_request.path_params["item_id"]
    found = [each for each in _raw_items_decoder.decode(record.items) if id_of(each) == item_id]
    if not found:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            f"The conversation {record.id} has no item {shown(item_id)}; GET its items for those it has.",
            "item_id",
        )
    if http_request.method != "DELETE":
        await http_request.respond(200, bytes(found[0]))
        return

    def change(record: Record) -> None:
        held = _raw_items_decoder.decode(record.items)
        record.items = encode_json([each for each in held if id_of(each) != item_id])

    changed = await service.responses.do(lambda file: file.rewrite(record.id, change))
    await http_request.respond(200, _existing(changed, record.id).answer)


async def items_so_far(store: ResponseStore, conversation_id: str) -> list[InputItem]:
    """Return the items of a conversation and mark it as used. Raises `RequestError` if it does not exist."""
    if not store.is_enabled:
        return input_of(_existing(None, conversation_id))
    try:
        records = await store.do(lambda file: file.conversation(conversation_id))
    except RequestError as error:
        raise RequestError(error.code, error.message, "conversation") from None
    return input_of(_existing(records[0] if records else None, conversation_id))


def _named(given: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return items in stored form, with ids. Raises `RequestError` for items that no request may have."""
    try:
        messages_of(None, given)
    except RequestError as error:
        message = error.message.replace("input[", "items[")
        raise RequestError(error.code, message, "items") from None
    return stored_items(given, f"item_{secrets.token_hex(ID_BYTES)}")


async def _find(store: ResponseStore, conversation_id: str) -> Record:
    record = await store.do(lambda file: file.find(conversation_id)) if store.is_enabled else None
    return _existing(record, conversation_id)


def _existing(record: Record | None, conversation_id: str) -> Record:
    if record is None or record.status != CONVERSATION:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            f"The conversation {shown(conversation_id)} is not stored: it was deleted or evicted "
            "(--response-store-entries, --response-store-size, --response-store-hours).",
            "conversation",
        )
    return record
