"""Responses that are answered in the background: nobody waits at a connection, and the store is told what comes.

A run is a reader like any other. Should its frontend be lost, the core keeps the request as it does for a client that was cut
off, and another frontend, or the next one in its slot, goes on behind what the store was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine

import msgspec

from quintet.frontend.api.answer import Submissions
from quintet.frontend.api.responses.events import ResponsesWriter
from quintet.frontend.api.responses.output import CANCELLED, FAILED, ResponsesAnswer, response_json
from quintet.frontend.api.responses.response_history import answer_of, turn_of
from quintet.frontend.response_store import Events, Record, ResponseFile
from quintet.frontend.resume.resume_token import claim_for
from quintet.frontend.resume.stream_cursor import StreamCursor, StreamId
from quintet.frontend.service import Service
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Submit

NOTHING_SEEN = [(None, False)]
PAUSE_S = 0.5
MAX_OWNERS = 6
"""So many frontends may answer one response in turn: one that ends them all must not go on for ever."""
_decode_request = msgspec.msgpack.Decoder(Submit).decode
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
        if submissions.streams[0].started is not None and not submissions.streams[0].is_posted:
            submissions.mailbox.nudge()  # what was adopted has begun
        while not writer.response:
            frames: list[bytes] = []
            for stream in await submissions.mailbox.wait():
                batch = submissions.take(stream)
                writer.write(frames, 0, stream, batch)
                if batch.error is not None and service.draining:
                    return  # the next server goes on with it, if its file outlives this one
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


def tell_start(submissions: Submissions) -> Submissions:
    """Have a run hear when its request begins, so that a response is in progress before it has ended."""
    for stream in submissions.streams:
        stream.tells_start = True
    return submissions


def _tell(
    response_id: str, owner: str, writer: ResponsesWriter, events: Events | None, file: ResponseFile
) -> bool:
    turn = turn_of(writer.answer, writer.status, writer.response)
    return file.tell(response_id, owner, writer.status, events, writer.response, turn)


def look_for_lost(service: Service) -> None:
    """Go on with what frontends were answering that are gone. To be called whenever somebody came or went."""
    store = service.responses
    if store.keeps and SEARCH not in service.background and store.path.exists():
        start(service, SEARCH, _take_over(service))


async def _take_over(service: Service) -> None:
    store, mine = service.responses, service.responses.owner(service.me)
    topology = None
    while topology is not service.sessions.slots.topology:  # somebody else may have come or gone meanwhile
        topology = service.sessions.slots.topology
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
    why = ""
    if record.num_owners > MAX_OWNERS:
        why = f"{MAX_OWNERS} processes that answered it were lost"
    elif not record.request:
        why = "the process that was to answer it was lost before it began"
    elif answer.options.model not in service.config.model.served_names:
        why = f"the server that answered it ended, and {answer.options.model} is served no more"
    if why:
        await _end(service, record, FAILED, RequestError(ErrorCode.INTERNAL, f"{why}; ask again."))
        return
    await _until_open(service)
    submissions = await _adopted(service, record) or tell_start(_sent_again(service, record, answer))
    try:
        await note_request(service, record, submissions)
        told = await service.responses.do(lambda file: file.last_position(record.id))
        writer = ResponsesWriter(answer, None, StreamCursor.parse(told, 1))
    except BaseException:
        submissions.close()
        raise
    await run(service, record, submissions, writer)


async def _until_open(service: Service) -> None:
    """Wait until a request may enter: at the end of the boot, or when others have left."""
    while True:
        try:
            service.admission.reenter(1)
            return
        except RequestError:
            if service.draining:
                raise
            await asyncio.sleep(PAUSE_S)


async def _adopted(service: Service, record: Record) -> Submissions | None:
    """Go on with the request that the core keeps, if it does."""
    if not record.stream:
        return None
    stream, first_id = StreamId.parse(record.stream), service.sessions.take_ids(1)
    try:
        reclaimed = await service.queries.reclaim(stream.request_id, stream.key, first_id)
    except RequestError:
        return None
    if reclaimed.admit is None:
        return None
    submissions = Submissions()
    submissions.add(service.sessions.adopt(reclaimed, first_id, NOTHING_SEEN, submissions.mailbox, 1))
    return submissions


def _sent_again(service: Service, record: Record, answer: ResponsesAnswer) -> Submissions:
    """Have it all computed again: with its seed, the same comes of it."""
    submit = _decode_request(record.request)
    spec, submissions = submit.spec, Submissions()
    submissions.add(
        service.sessions.submit(
            submit.prompt,
            spec.params,
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            mailbox=submissions.mailbox,
            are_checked=True,
            claim=claim_for(answer, service.config),
            deadline_ns=spec.deadline_ns,
            limit_gives_way=submit.limit_gives_way,
            reading=spec.reading,
            session=submit.session,
        )
    )
    return submissions


async def note_request(service: Service, record: Record, submissions: Submissions) -> None:
    """Note what is computed for a response, so that whoever takes it over can go on with it, or begin again."""
    stream_id = submissions.stream_id
    stream = "" if stream_id is None else str(stream_id)
    request = record.request or msgspec.msgpack.encode(submissions.streams[0].submit)
    record.stream, record.request = stream, request
    await service.responses.do(lambda file: file.note_request(record.id, stream, request))


async def _end(service: Service, record: Record, status: str, error: RequestError | None) -> None:
    response = response_json(answer_of(record).head, status, [], error=error)
    await service.responses.do(lambda file: file.finish(record.id, status, response, is_open=True))


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
