"""Resume a streamed response after a lost connection or a lost frontend.

Every event id holds the stream cursor (`quintet.frontend.resume.stream_cursor`). The client gets the later events
from any frontend: by ``GET /v1/streams/<stream>?from=<position>``, or by repeating the request with the
``Last-Event-ID`` header. The core retains the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import parse_qs

from quintet.frontend.api.answer import Submissions, stream_answer
from quintet.frontend.api.openai.answer import ChunkWriter
from quintet.frontend.api.openai.redetokenize import replay_usage
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.reattachment import ReceivedCount
from quintet.frontend.resume.registry import answer_of, api_of
from quintet.frontend.resume.stream_cursor import StreamCursor, StreamId
from quintet.frontend.resume.token_relay import with_relay
from quintet.frontend.service import Handler, Service
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Admit, Reclaimed

LAST_EVENT = "last-event-id"
NOTHING_RECEIVED = (None, False)
"""Cursor of a choice that is sent from its start."""


async def streams(service: Service, http_request: HttpRequest) -> None:
    """GET /v1/streams/{id}: events after a cursor, from the query ``from`` or ``Last-Event-ID``."""
    query = parse_qs(http_request.query)
    given = query.get("from", [""])[0].replace(" ", "+")  # a form-encoded plus; cursors have no space
    given = given or (http_request.header(LAST_EVENT) or "").partition(":")[2]
    await resume(service, http_request, StreamId.parse(http_request.path_params["id"]), given)


def resumable(handler: Handler) -> Handler:
    """Wrap an endpoint: with ``Last-Event-ID`` it resumes that stream, else it handles the request."""

    async def endpoint(service: Service, http_request: HttpRequest) -> None:
        event_id = http_request.header(LAST_EVENT)
        if not event_id:
            await handler(service, http_request)
            return
        await http_request.read_json_body(service.bodies)
        stream, _, given = event_id.partition(":")
        await resume(service, http_request, StreamId.parse(stream), given)

    return endpoint


async def resume(service: Service, http_request: HttpRequest, stream_id: StreamId, given: str) -> None:
    """Write the events after a cursor. Raises `RequestError` if no core knows the stream."""
    admit = _known(await service.queries.reclaim(stream_id.request_id, stream_id.key))
    assert admit.spec.resume_token is not None
    answer = answer_of(admit.spec.resume_token)
    api = api_of(answer)
    http_request.errors = api.errors
    n = answer.num_choices
    total = answer.num_prompts * n
    position = StreamCursor.parse(given, total)
    service.admission.reenter(total)
    first_id = service.sessions.take_ids(total)
    reclaimed = [
        await service.queries.reclaim(stream_id.request_id + offset, stream_id.key, first_id + offset)
        for offset in range(0, total, n)
    ]
    submissions = Submissions()
    try:
        for offset, each in zip(range(0, total, n), reclaimed, strict=True):
            received = list(zip(position.counts, position.ended, strict=True))[offset : offset + n]
            _check(each, received)
            if api.needs_replay:
                received = [NOTHING_RECEIVED] * n
            stream = service.sessions.reattach(
                each, first_id + offset, received, submissions.mailbox, answer.interval
            )
            submissions.add(stream)
        writer = api.writer(answer, StreamId(first_id, stream_id.key), position)
        with_relay(http_request, writer, submissions, _received(reclaimed, position, n))
        if isinstance(writer, ChunkWriter) and writer.options.include_usage:
            await replay_usage(service, submissions)
    except BaseException:
        submissions.close()
        raise
    await stream_answer(service, http_request, submissions, writer, api.before_end)


def _received(
    reclaimed: Sequence[Reclaimed], position: StreamCursor, n: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield (index, received token ids) for each choice with output before the cursor, ``n`` choices per prompt."""
    outputs = [dict(each.choices) for each in reclaimed]
    for index, count in enumerate(position.counts):
        prompt, choice = divmod(index, n)
        if count is not None:
            yield index, unpack_i32(outputs[prompt].get(choice, b""))[:count]


def _known(reclaimed: Reclaimed) -> Admit:
    if reclaimed.admit is None:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            "Unknown stream: it was read to its end, cancelled, or not resumed within --stream-grace seconds. "
            "Send the request again.",
            "stream",
        )
    return reclaimed.admit


def _check(reclaimed: Reclaimed, received: Sequence[ReceivedCount]) -> None:
    _known(reclaimed)
    outputs = dict(reclaimed.choices)
    for index, (count, _) in enumerate(received):
        known = len(outputs.get(index, b"")) // 4
        if count is not None and count > known:
            raise RequestError(
                ErrorCode.INVALID,
                f"The position counts {count} tokens of choice {index}, but {known} were generated. Send the id of the last "
                "event that was received.",
                "from",
            )
