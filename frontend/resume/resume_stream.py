"""Go on reading a streamed answer: after a lost connection, or after the frontend that wrote it was lost.

Every event names where its reader is (`quintet.frontend.resume.stream_cursor`). A client gets what comes after that, from any
frontend, by ``GET /v1/streams/<stream>?from=<position>``, or by sending the ``Last-Event-ID`` header along with the
request again. The core gives the frontend everything it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import parse_qs

from quintet.frontend.api.answer import Submissions, stream_answer
from quintet.frontend.api.openai.answer import ChunkWriter
from quintet.frontend.api.openai.usage_replay import recall
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.reattach import Seen
from quintet.frontend.resume.registry import answer_of, dialect_of
from quintet.frontend.resume.stream_cursor import StreamCursor, StreamId
from quintet.frontend.resume.token_relay import relaying
from quintet.frontend.service import Handler, Service
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Admit, Reclaimed

LAST_EVENT = "last-event-id"
NOTHING = (None, False)
"""What a client has seen of a choice that is told from its beginning."""


async def streams(service: Service, exchange: HttpRequest) -> None:
    """GET /v1/streams/{id}: the events after a position, given as ``from`` or in ``Last-Event-ID``."""
    query = parse_qs(exchange.query)
    given = query.get("from", [""])[0].replace(" ", "+")  # as forms spell a plus; no position has a space
    given = given or (exchange.header(LAST_EVENT) or "").partition(":")[2]
    await resume(service, exchange, StreamId.parse(exchange.path_params["id"]), given)


def resumable(handler: Handler) -> Handler:
    """Return an endpoint that goes on with the stream of ``Last-Event-ID`` if there is one, else does what it did."""

    async def endpoint(service: Service, exchange: HttpRequest) -> None:
        event_id = exchange.header(LAST_EVENT)
        if not event_id:
            await handler(service, exchange)
            return
        await exchange.read_json_body(service.bodies)
        stream, _, given = event_id.partition(":")
        await resume(service, exchange, StreamId.parse(stream), given)

    return endpoint


async def resume(service: Service, exchange: HttpRequest, stream_id: StreamId, given: str) -> None:
    """Write what comes after a position of a stream. Raises `RequestError` when nobody knows the stream (any more)."""
    admit = _known(await service.queries.reclaim(stream_id.request_id, stream_id.key))
    assert admit.spec.claim is not None
    answer = answer_of(admit.spec.claim)
    dialect = dialect_of(answer)
    exchange.errors = dialect.errors
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
            seen = list(zip(position.counts, position.ended, strict=True))[offset : offset + n]
            _check(each, seen)
            if dialect.is_retold:
                seen = [NOTHING] * n
            stream = service.sessions.adopt(
                each, first_id + offset, seen, submissions.mailbox, answer.interval
            )
            submissions.add(stream)
        writer = dialect.writer(answer, StreamId(first_id, stream_id.key), position)
        relaying(exchange, writer, submissions, _told(reclaimed, position, n))
        if isinstance(writer, ChunkWriter) and writer.options.include_usage:
            await recall(service, submissions)
    except BaseException:
        submissions.close()
        raise
    await stream_answer(service, exchange, submissions, writer, dialect.before_end)


def _told(
    reclaimed: Sequence[Reclaimed], position: StreamCursor, n: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield each choice of which something was told, of ``n`` of each prompt, and those of its tokens."""
    outputs = [dict(each.choices) for each in reclaimed]
    for index, count in enumerate(position.counts):
        prompt, choice = divmod(index, n)
        if count is not None:
            yield index, unpack_i32(outputs[prompt].get(choice, b""))[:count]


def _known(reclaimed: Reclaimed) -> Admit:
    if reclaimed.admit is None:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            "This server does not know the stream, or not any more: it was read to its end, cancelled, or not asked for "
            "within the time of grace (--stream-grace). Send the request again.",
            "stream",
        )
    return reclaimed.admit


def _check(reclaimed: Reclaimed, seen: Sequence[Seen]) -> None:
    _known(reclaimed)
    outputs = dict(reclaimed.choices)
    for index, (count, _) in enumerate(seen):
        known = len(outputs.get(index, b"")) // 4
        if count is not None and count > known:
            raise RequestError(
                ErrorCode.INVALID,
                f"The position says {count} tokens of choice {index}; the server made {known}. Send the id of the last "
                "event that was received.",
                "from",
            )
