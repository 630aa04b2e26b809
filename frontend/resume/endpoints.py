"""Endpoints that resume a streamed response after a lost connection, frontend or server.

Every event id holds the stream cursor (`quintet.frontend.resume.stream_state`). There are two ways to the later events:

- GET /v1/streams/<stream>?from=<position>, or the request again with the header ``Last-Event-ID``: from any frontend of the
  same server. A core retained the request.
- POST /v1/streams: from another server. The proxy sends the original request, the seed, time and id from the relay header,
  its client's cursor, and the token ids of every choice (`token_relay`). The text is the same if both servers have the same
  model.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec

from quintet.frontend.api.answer import AnswerWriter, BeforeEnd, Submissions, stream_answer
from quintet.frontend.api.anthropic.errors import ERRORS as ANTHROPIC_ERRORS
from quintet.frontend.api.anthropic.events import MessagesAnswer, MessagesWriter
from quintet.frontend.api.anthropic.messages import messages
from quintet.frontend.api.inference.generate import GenerateAnswer, generate
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import ChunkWriter
from quintet.frontend.api.openai.chat import ChatAnswer, chat_completions
from quintet.frontend.api.openai.completions import CompletionAnswer, completions
from quintet.frontend.api.openai.errors import ERRORS
from quintet.frontend.api.openai.redetokenize import replay_usage
from quintet.frontend.api.responses.create import responses
from quintet.frontend.api.responses.events import ResponsesWriter
from quintet.frontend.api.responses.output import ResponsesAnswer
from quintet.frontend.api.responses.response_history import store_end
from quintet.frontend.http.error_shape import ErrorShape
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.retained import resume_retained
from quintet.frontend.resume.stream_state import (
    LAST_EVENT,
    Answer,
    StreamCursor,
    StreamId,
)
from quintet.frontend.resume.token_relay import PartialResponse
from quintet.frontend.service import Handler, Service
from quintet.frontend.streams import Received
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.messages import Admit, Resumed
from quintet.wire.params import check_token_ids, shown

MIN_SEED, MAX_SEED = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ResumableApi:
    """One API with resumable streams."""

    path: str
    handler: Handler
    answer: type[Answer]
    """Its answer in the resume token."""
    writer: Callable[[Any, StreamId | None, StreamCursor | None], AnswerWriter]
    """Makes the writer of a response that has ids (or None), starting after a cursor (None: at the start)."""
    errors: ErrorShape = ERRORS
    needs_replay: bool = False
    """True if the writer needs the output from its start, wherever the cursor is."""
    before_end: BeforeEnd | None = None


RESUMABLE_APIS = (
    ResumableApi("/v1/completions", completions, CompletionAnswer, ChunkWriter),
    ResumableApi("/v1/chat/completions", chat_completions, ChatAnswer, ChunkWriter),
    ResumableApi("/v1/messages", messages, MessagesAnswer, MessagesWriter, ANTHROPIC_ERRORS),
    ResumableApi("/inference/v1/generate", generate, GenerateAnswer, ChunkWriter),
    ResumableApi(
        "/v1/responses", responses, ResponsesAnswer, ResponsesWriter, needs_replay=True, before_end=store_end
    ),
)
_BY_PATH = {api.path: api for api in RESUMABLE_APIS}
_BY_ANSWER = {api.answer: api for api in RESUMABLE_APIS}
_ANSWERS: Any = functools.reduce(operator.or_, _BY_ANSWER)
_decode_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(_ANSWERS).decode


async def resume_stream(service: Service, http_request: HttpRequest) -> None:
    """GET /v1/streams/{id}: events after a cursor, from the query ``from`` or ``Last-Event-ID``."""
    query = parse_qs(http_request.query)
    given = query.get("from", [""])[0].replace(" ", "+")  # a form-encoded plus; cursors have no space
    given = given or (http_request.header(LAST_EVENT) or "").partition(":")[2]
    await _resume(service, http_request, StreamId.parse(http_request.path_params["id"]), given)


async def resume_repeated(service: Service, http_request: HttpRequest) -> None:
    """Resume the stream of a repeated request with ``Last-Event-ID``."""
    await http_request.read_json_body(service.bodies)
    stream, _, given = (http_request.header(LAST_EVENT) or "").partition(":")
    await _resume(service, http_request, StreamId.parse(stream), given)


async def _resume(service: Service, http_request: HttpRequest, stream_id: StreamId, given: str) -> None:
    """Write the events after a cursor. Raises `RequestError` if no core knows the stream."""
    admit = _known(await service.queries.resume(stream_id.request_id, stream_id.key))
    assert admit.spec.resume_token is not None
    answer = _decode_answer(admit.spec.resume_token.answer)
    api = _BY_ANSWER[type(answer)]
    http_request.errors = api.errors
    n = answer.num_choices
    total = answer.num_prompts * n
    position = StreamCursor.parse(given, total)
    service.admission.check_resumed(total)
    first_id = service.requests.take_ids(total)
    resumed = [
        await service.queries.resume(stream_id.request_id + offset, stream_id.key, first_id + offset)
        for offset in range(0, total, n)
    ]
    submissions = Submissions()
    with submissions:
        received: list[Received] = []
        for offset, each in zip(range(0, total, n), resumed, strict=True):
            has = _received(each, position, offset, n)
            received += has
            stream = resume_retained(
                service.requests,
                each,
                first_id + offset,
                [(None, False)] * n if api.needs_replay else has,
                submissions.mailbox,
                answer.interval,
            )
            submissions.add(stream)
        writer = api.writer(answer, StreamId(first_id, stream_id.key), position)
        submissions.replayed = [(index, ids) for index, (ids, _) in enumerate(received) if ids is not None]
        if isinstance(writer, ChunkWriter) and writer.options.include_usage:
            await replay_usage(service, submissions)
    await stream_answer(service, http_request, submissions, writer, api.before_end)


def _received(resumed: Resumed, position: StreamCursor, first: int, n: int) -> list[Received]:
    """Return the output before the cursor of ``n`` choices of one prompt, from index ``first``. Raises `RequestError`."""
    _known(resumed)
    outputs, received = dict(resumed.choices), list[Received]()
    for index in range(n):
        count, ids = position.counts[first + index], unpack_i32(outputs.get(index, b""))
        if count is not None and count > len(ids):
            raise invalid(
                f"The position counts {count} tokens of choice {index}, but {len(ids)} were generated. Send the id of the "
                "last event that was received.",
                "from",
            )
        received.append((None if count is None else ids[:count], position.ended[first + index]))
    return received


def _known(resumed: Resumed) -> Admit:
    if resumed.admit is None:
        raise RequestError(
            ErrorCode.NOT_FOUND,
            "Unknown stream: it was read to its end, cancelled, or not resumed within --stream-grace seconds. "
            "Send the request again.",
            "stream",
        )
    return resumed.admit


class ResumeStreamBody(msgspec.Struct):
    """Original request, and the response received so far."""

    path: str
    """Path of the original request."""
    request: msgspec.Raw
    """Body of the original request."""
    position: str
    """Part after the colon of the last event id; 0 for none."""
    outputs: list[list[int]]
    seeds: list[int]
    """One per prompt."""
    created: int
    name: str = ""
    """From the header X-Quintet-Relay, after the seeds and the time; "" without one."""


class _StreamFlags(msgspec.Struct):
    """Fields that decide whether a response can be resumed."""

    stream: bool | None = None
    use_beam_search: bool | None = None


_decoder = msgspec.json.Decoder(ResumeStreamBody)
_flags_decoder = msgspec.json.Decoder(_StreamFlags)


async def resume_from_server(service: Service, http_request: HttpRequest) -> None:
    body = parse.decode(await http_request.read_json_body(service.bodies), _decoder)
    api = _BY_PATH.get(body.path)
    if api is None:
        raise invalid(
            f"path is {shown(body.path)}; streams of {', '.join(_BY_PATH)} can be continued.", "path"
        )
    is_seed = all(MIN_SEED <= seed <= MAX_SEED for seed in body.seeds)
    if not is_seed or not 0 <= body.created <= MAX_SEED:
        raise invalid("seeds and created must equal those of the header X-Quintet-Relay.", "seeds")
    flags = parse.decode(bytes(body.request), _flags_decoder)
    if not flags.stream:
        raise invalid(
            "request has no `stream: true`, and only streams can be continued; send it again to its path.",
            "stream",
        )
    if flags.use_beam_search:
        raise invalid(
            "request uses beam search, which cannot be continued; send it again to its path.",
            "use_beam_search",
        )
    for ids in body.outputs:
        check_token_ids(ids, service.config.model.vocab_size, "outputs")
    http_request.replace_body(
        bytes(body.request), PartialResponse(body.position, body.outputs, body.seeds, body.created, body.name)
    )
    http_request.errors = api.errors
    await api.handler(service, http_request)
