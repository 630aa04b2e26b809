"""Responses that are answered in the background: nobody waits at a connection, and the store is told what comes.

A run is a reader like any other. Should its frontend be lost, the core keeps the request as it does for a client that was cut
off, and another frontend, or the next one in its seat, goes on behind what the store was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine

from quintet.frontend.dialects.answer import Submissions
from quintet.frontend.dialects.position import Position, StreamId
from quintet.frontend.dialects.responses_events import ResponsesWriter
from quintet.frontend.dialects.responses_kept import answer_of
from quintet.frontend.dialects.responses_output import CANCELLED, FAILED, response_json
from quintet.frontend.response_store import Events, Record, ResponseFile
from quintet.frontend.service import Service
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Reclaimed

NOTHING_SEEN = [(-1, False)]
CORE_TRIES, CORE_PAUSE_S = 60, 0.5
SEARCH = "search"
_log = logging.getLogger("quintet")


def start(service: Service, name: str, work: Coroutine[None, None, None]) -> None:
    """Do something that no client waits for; the server does not drain before it is done."""
    service.num_exchanges += 1
    task = service.background[name] = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(functools.partial(_done, service, name))


def _done(service: Service, name: str, task: asyncio.Task[None]) -> None:
    if service.background.get(name) is task:
        del service.background[name]
    service.num_exchanges -= 1
    if not task.cancelled() and task.exception() is not None:
        _log.error("in the background: %s failed", name, exc_info=task.exception())
    service.check_drained()


async def run(service: Service, record: Record, submissions: Submissions, writer: ResponsesWriter) -> None:
    """Tell the store what comes of a response, until it has ended or nobody wants to know any more."""
    store, owner = service.responses, service.responses.owner(service.me)
    untold = True
    try:
        while not writer.response:
            frames: list[bytes] = []
            for stream in await submissions.mailbox.wait():
                batch = submissions.take(stream)
                writer.write(frames, 0, stream, batch)
                if batch.error is not None:
                    frames.append(writer.failed(batch.error))
            events = None
            if record.streams and frames:
                events = Events(writer.last_number, writer.position, b"".join(frames))
            if untold or events is not None or writer.response:
                tell = functools.partial(_tell, record.id, owner, writer, events)
                if not await store.do(tell):
                    return
                untold = False
    finally:
        submissions.close()


def _tell(
    response_id: str, owner: str, writer: ResponsesWriter, events: Events | None, file: ResponseFile
) -> bool:
    return file.tell(response_id, owner, writer.status, events, writer.response)


def look_for_lost(service: Service) -> None:
    """Go on with what frontends were answering that are gone. To be called whenever somebody came or went."""
    store = service.responses
    if store.keeps and SEARCH not in service.background and store.path.exists():
        start(service, SEARCH, _take_over(service))


async def _take_over(service: Service) -> None:
    store, mine = service.responses, service.responses.owner(service.me)
    topology = None
    while topology is not service.sessions.seats.topology:  # somebody else may have come or gone meanwhile
        topology = service.sessions.seats.topology
        owners = await store.do(lambda file: file.owners())
        gone = [owner for owner in owners if store.is_gone(owner, topology)]
        if gone:
            for record in await store.do(functools.partial(_take, mine, gone)):
                start(service, record.id, _go_on(service, record))


def _take(owner: str, former: list[str], file: ResponseFile) -> list[Record]:
    return file.take_over(owner, former)


async def _go_on(service: Service, record: Record) -> None:
    """Answer what another frontend began to."""
    answer = answer_of(record)
    if not record.background:  # who reads it may still come back, and then it ends otherwise
        await _end(service, record, CANCELLED, None)
        return
    first_id = service.sessions.take_ids(1)
    reclaimed = await _reclaim(service, record, first_id)
    if reclaimed is None or reclaimed.admit is None:
        error = RequestError(ErrorCode.INTERNAL, "The server lost the processes that answered it; ask again.")
        await _end(service, record, FAILED, error)
        return
    submissions = Submissions()
    try:
        submissions.add(service.sessions.adopt(reclaimed, first_id, NOTHING_SEEN, submissions.mailbox, 1))
        assert reclaimed.admit.spec.claim is not None
        stream = str(StreamId(first_id, reclaimed.admit.spec.claim.key))
        await service.responses.do(lambda file: file.note_stream(record.id, stream))
        told = await service.responses.do(lambda file: file.last_position(record.id))
    except BaseException:
        submissions.close()
        raise
    await run(service, record, submissions, ResponsesWriter(answer, None, Position.parse(told, 1)))


async def _end(service: Service, record: Record, status: str, error: RequestError | None) -> None:
    response = response_json(answer_of(record).head, status, [], error=error)
    await service.responses.do(lambda file: file.finish(record.id, status, response, is_open=True))


async def _reclaim(service: Service, record: Record, rename_to: int) -> Reclaimed | None:
    """Ask the core for the request behind a response, as soon as there is a core."""
    if not record.stream:
        return None
    stream = StreamId.parse(record.stream)
    for _ in range(CORE_TRIES):
        try:
            return await service.queries.reclaim(stream.request_id, stream.key, rename_to)
        except RequestError:
            await asyncio.sleep(CORE_PAUSE_S)
    return None


async def cancel(service: Service, record: Record) -> None:
    """End a response that is answered in the background, wherever that is, and note it."""
    await _end(service, record, CANCELLED, None)
    await stop(service, record)


async def stop(service: Service, record: Record) -> None:
    """Compute no more for a response. Who answers it elsewhere finds that out."""
    task = service.background.get(record.id)
    if task is not None:
        task.cancel()
    elif record.stream and record.is_open:
        stream = StreamId.parse(record.stream)
        with contextlib.suppress(RequestError):  # there is no core now, so none computes it either
            await service.queries.reclaim(stream.request_id, stream.key)
