"""GET, DELETE and cancel of /v1/responses/{id}, its input items, and its events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from typing import Any

from quintet.frontend.api import sse
from quintet.frontend.api.responses.background import end, stop
from quintet.frontend.api.responses.events import ResponsesWriter
from quintet.frontend.api.responses.output import CANCELLED
from quintet.frontend.api.responses.response_history import (
    answer_of,
    find,
    input_of,
    items_before,
    response_of,
    stored_items,
)
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest
from quintet.frontend.response_store import IN_PROGRESS, QUEUED, Events, Record, ResponseFile
from quintet.frontend.service import Service
from quintet.wire.errors import RequestError, invalid
from quintet.wire.params import MAX_COUNT, shown

_log = logging.getLogger("quintet")
POLL_S, MAX_POLL_S = 0.025, 0.4
"""Poll interval of the store: doubles while there is no progress."""
MAX_ITEMS, DEFAULT_ITEMS = 100, 20


async def response(service: Service, http_request: HttpRequest) -> None:
    """GET or DELETE /v1/responses/{id}. With ``stream``: its events after number ``starting_after``."""
    record = await find(service, http_request.path_params["id"])
    if http_request.method == "DELETE":
        await service.responses.do(lambda file: file.delete(record.id))
        await stop(service, record)
        await http_request.respond_json({"id": record.id, "object": "response", "deleted": True})
    elif http_request.has_flag("stream"):
        after = _number(http_request, "starting_after", MAX_COUNT)
        await write_events(service, http_request, record, 0 if after is None else after + 1)
    else:
        await http_request.respond(200, response_of(record))


async def cancel_response(service: Service, http_request: HttpRequest) -> None:
    record = await find(service, http_request.path_params["id"])
    if not record.background:
        raise invalid(
            "Only a response created with background: true can be cancelled; close the connection of others.",
            "response_id",
        )
    if record.is_open:
        await end(service, record, CANCELLED)
        await stop(service, record)  # on any frontend
        record = await find(service, record.id)
    await http_request.respond(200, response_of(record))


async def input_items(service: Service, http_request: HttpRequest) -> None:
    """GET /v1/responses/{id}/input_items: input items, including those of previous responses."""
    record = await find(service, http_request.path_params["id"])
    former = await items_before(service.responses, record)
    await http_request.respond_json(
        page_of(http_request, stored_items([*former, *input_of(record)], record.id))
    )


def page_of(http_request: HttpRequest, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one page of a list, by the query's ``limit``, ``order`` and ``after``."""
    order, after = http_request.query_param("order") or "desc", http_request.query_param("after")
    if order not in ("asc", "desc"):
        raise invalid(f"order is {shown(order)}; it must be 'asc' or 'desc'.", "order")
    if order == "desc":
        items.reverse()
    if after:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid(f"after is {shown(after)}; it must be the id of one of the items.", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: _number(http_request, "limit", MAX_ITEMS, least=1) or DEFAULT_ITEMS]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }


def _number(http_request: HttpRequest, name: str, most: int, least: int = 0) -> int | None:
    given = http_request.query_param(name)
    if not given:
        return None
    if not given.isdecimal() or len(given) > 10 or not least <= int(given) <= most:
        raise invalid(f"{name} is {shown(given)}; it must be a number from {least} to {most}.", name)
    return int(given)


async def write_events(service: Service, http_request: HttpRequest, record: Record, first: int) -> None:
    """Write a response's events from number ``first``: stored ones, then new ones as they arrive.

    If the events were not stored, they are rebuilt from the final response.
    """
    gone = asyncio.Event()
    watcher = http_request.watch_disconnect(gone.set)
    reader = service.write_timeout.watch(http_request.abort, lambda: 0)
    keep_alive_s = service.config.frontend.keep_alive_s or math.inf
    try:
        await http_request.start_stream(sse.CONTENT_TYPE, sse.HEADERS)
        last_write_s, pause_s = time.perf_counter(), POLL_S
        while not gone.is_set():
            read = functools.partial(ResponseFile.read_events, response_id=record.id, first=first)
            status, events = await service.responses.do(read)
            has_ended = not events and status not in (QUEUED, IN_PROGRESS)
            chunk = b"".join(_from(each, first) for each in events)
            if has_ended and status and not record.streams:
                chunk = _from(_replayed(await find(service, record.id)), first)
            elif not events and not has_ended and time.perf_counter() - last_write_s > keep_alive_s:
                chunk = sse.KEEP_ALIVE
            if chunk or has_ended:
                last_write_s = reader.waiting_since_s = time.perf_counter()
                await http_request.write(chunk, has_ended)
                reader.waiting_since_s = None
            if has_ended:
                return
            if events:
                first, pause_s = events[-1].number + 1, POLL_S
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(gone.wait(), pause_s)
                pause_s = min(2 * pause_s, MAX_POLL_S)
        raise ClientDisconnected
    except RequestError as error:  # the status line was already sent
        _log.warning("response %s: reading its events failed: %s", record.id, error)
        http_request.abort()
        raise ClientDisconnected from error
    finally:
        service.write_timeout.forget(reader)
        watcher.cancel()


def _replayed(record: Record) -> Events:
    writer = ResponsesWriter(answer_of(record))
    frames = b"".join(writer.replay(response_of(record)))
    return Events(writer.last_number, "", frames)


def _from(events: Events, first: int) -> bytes:
    """Return the events from number ``first`` on."""
    frames = events.frames.split(b"\n\n")[:-1]
    own = events.number - len(frames) + 1
    return b"".join(frame + b"\n\n" for frame in frames[max(0, first - own) :])
