"""Background responses: answered without a waiting client, with progress written to the store.

If the frontend is lost, the core retains the request as for a disconnected client. Another frontend, or the slot's
next process, resumes it after the last stored event.
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
from quintet.frontend.api.responses.response_history import answer_of, conversation_turn
from quintet.frontend.response_store import Events, Record, ResponseFile
from quintet.frontend.resume.retained import resume_retained
from quintet.frontend.resume.stream_state import StreamCursor, StreamId, resume_token_for
from quintet.frontend.service import Service
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Submit
from quintet.wire.request import RequestSpec, adapter_digest, model_names

PAUSE_S = 0.5
MAX_OWNERS = 6
"""Maximum frontends that answer one response in turn: a response that crashes frontends must not be retried forever."""
_decode_request = msgspec.msgpack.Decoder(Submit).decode
SEARCH = "search"
_log = logging.getLogger("quintet")


def start(service: Service, name: str, work: Coroutine[None, None, None]) -> None:
    """Start a background task; the server does not finish draining before its end."""
    service.num_exchanges += 1
    task = service.background[name] = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(functools.partial(_done, service, name))


def _done(service: Service, name: str, task: asyncio.Task[None]) -> None:
    if service.background.get(name) is task:
        del service.background[name]
    service.num_exchanges -= 1
    if not task.cancelled() and task.exception() is not None:
        _log.error("background task %s failed", name, exc_info=task.exception())
    service.check_drained()


async def run(service: Service, record: Record, submissions: Submissions, writer: ResponsesWriter) -> None:
    """Write a response's progress to the store until it ends, is cancelled or deleted."""
    store, owner = service.responses, service.responses.owner(service.me)
    is_new = True
    try:
        if submissions.streams[0].started is not None and not submissions.streams[0].is_posted:
            submissions.mailbox.wake()  # a resumed request has already started
        while not writer.response:
            frames: list[bytes] = []
            for stream in await submissions.mailbox.wait():
                batch = submissions.take(stream)
                writer.write(frames, 0, stream, batch)
                if batch.error is not None and service.draining:
                    return  # the next server resumes it, if the store outlives this one
                if batch.error is not None:
                    frames.append(writer.failed(batch.error))
            events = None
            if record.streams and frames:
                events = Events(writer.last_number, writer.position, b"".join(frames))
            if is_new or events is not None or writer.response:
                turn = conversation_turn(writer.answer, writer.status, writer.response)
                write = functools.partial(
                    ResponseFile.write_progress,
                    response_id=record.id,
                    owner=owner,
                    status=writer.status,
                    events=events,
                    response=writer.response,
                    turn=turn,
                )
                if not await store.do(write):
                    return
                is_new = False
    finally:
        submissions.close()


def wake_on_start(submissions: Submissions) -> Submissions:
    """Wake the run also at its request's start, so that the response becomes in_progress then."""
    for stream in submissions.streams:
        stream.wakes_on_start = True
    return submissions


def resume_lost(service: Service) -> None:
    """Resume background responses of lost frontends. Call on every new topology."""
    store = service.responses
    if store.is_enabled and SEARCH not in service.background and store.path.exists():
        start(service, SEARCH, _resume_lost(service))


async def _resume_lost(service: Service) -> None:
    store, mine = service.responses, service.responses.owner(service.me)
    topology = None
    while topology is not service.requests.workers.topology:  # repeat if the topology changed meanwhile
        topology = service.requests.workers.topology
        owners = await store.do(lambda file: file.owners())
        gone = [owner for owner in owners if store.is_lost(owner, topology)]
        if gone:
            claim = functools.partial(ResponseFile.claim, owner=mine, former=gone)
            for record in await store.do(claim):
                start(service, record.id, _resume(service, record))


async def _resume(service: Service, record: Record) -> None:
    """Resume a response that another frontend began."""
    answer = answer_of(record)
    if not record.background:  # its client may still resume the stream, and then it ends normally
        await end(service, record, CANCELLED)
        return
    reason = ""
    if record.num_owners > MAX_OWNERS:
        reason = f"the {MAX_OWNERS} processes that answered it were lost"
    elif not record.request:
        reason = "the process that was to answer it was lost before it started"
    elif answer.options.model not in model_names(service.config.model):
        reason = f"the server that answered it stopped, and {answer.options.model} is no longer served"
    if reason:
        await end(
            service, record, FAILED, RequestError(ErrorCode.INTERNAL, f"{reason}; send the request again.")
        )
        return
    await _wait_for_admission(service)
    submissions = await _resumed(service, record) or wake_on_start(_resubmitted(service, record, answer))
    with submissions:
        await note_request(service, record, submissions)
        position = await service.responses.do(lambda file: file.last_position(record.id))
        writer = ResponsesWriter(answer, None, StreamCursor.parse(position, 1))
    await run(service, record, submissions, writer)


async def _wait_for_admission(service: Service) -> None:
    while True:
        try:
            service.admission.check_resumed(1)
            return
        except RequestError:
            if service.draining:
                raise
            await asyncio.sleep(PAUSE_S)


async def _resumed(service: Service, record: Record) -> Submissions | None:
    """Resume the request from the core, if the core retained it."""
    if not record.stream:
        return None
    stream, first_id = StreamId.parse(record.stream), service.requests.take_ids(1)
    try:
        resumed = await service.queries.resume(stream.request_id, stream.key, first_id)
    except RequestError:
        return None
    if resumed.admit is None:
        return None
    submissions = Submissions()
    received, mailbox = [(None, False)], submissions.mailbox
    submissions.add(resume_retained(service.requests, resumed, first_id, received, mailbox, 1))
    return submissions


def _resubmitted(service: Service, record: Record, answer: ResponsesAnswer) -> Submissions:
    """Send the request again from its start; the same seed gives the same output."""
    submit = _decode_request(record.request)
    spec, submissions = submit.spec, Submissions()
    submissions.add(
        service.requests.submit(
            submit.prompt,
            RequestSpec(
                spec.params,
                priority=spec.priority,
                cache_salt=spec.cache_salt,
                adapter=adapter_digest(service.config.model, answer.options.model),
                resume_token=resume_token_for(answer, service.config),
                deadline_ns=spec.deadline_ns,
                parsing=spec.parsing,
            ),
            mailbox=submissions.mailbox,
            clamp_max_tokens=submit.clamp_max_tokens,
            session=submit.session,
        )
    )
    return submissions


async def note_request(service: Service, record: Record, submissions: Submissions) -> None:
    """Store the request and its stream id, so that another frontend can resume or repeat it."""
    stream_id = submissions.stream_id
    stream = "" if stream_id is None else str(stream_id)
    request = record.request or msgspec.msgpack.encode(submissions.streams[0].submit)
    record.stream, record.request = stream, request
    await service.responses.do(lambda file: file.note_request(record.id, stream, request))


async def end(service: Service, record: Record, status: str, error: RequestError | None = None) -> None:
    """Store the end of a response, unless it has ended."""
    response = response_json(answer_of(record).head, status, [], error=error)
    await service.responses.do(lambda file: file.finish(record.id, status, response, is_open=True))


async def stop(service: Service, record: Record) -> None:
    """Stop generating a response. A frontend that answers it notices at its next write."""
    task = service.background.get(record.id)
    if task is not None:
        task.cancel()
    elif record.stream and record.is_open:
        stream = StreamId.parse(record.stream)
        with contextlib.suppress(RequestError):  # without a core no request runs
            await service.queries.resume(stream.request_id, stream.key)
