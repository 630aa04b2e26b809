"""POST /v1/responses, /v1/responses/render and /v1/responses/input_tokens."""

from __future__ import annotations

import functools
import re
import secrets
import time
from dataclasses import dataclass, replace

import msgspec

from quintet.frontend.api import sse
from quintet.frontend.api.answer import Submissions, session_of, stream_answer, submit_all
from quintet.frontend.api.channels import channels_of
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import AnswerOptions, encode_json
from quintet.frontend.api.openai.chat_body import checked_chat
from quintet.frontend.api.openai.offered_tools import Translation
from quintet.frontend.api.openai.prompts import num_tokens
from quintet.frontend.api.openai.render import respond_rendered
from quintet.frontend.api.openai.types import ChatBody
from quintet.frontend.api.outputs import collect_outputs
from quintet.frontend.api.responses.background import note_request, run, start, wake_on_start
from quintet.frontend.api.responses.conversations import items_so_far
from quintet.frontend.api.responses.events import ResponsesWriter, response_of_output
from quintet.frontend.api.responses.output import CANCELLED, ResponsesAnswer, response_json
from quintet.frontend.api.responses.parse import (
    CLIENT_NAMES,
    LOGPROBS,
    REASONING_STATE,
    chat_body,
    conversation_of,
    echo_of,
    items_of,
)
from quintet.frontend.api.responses.response_history import (
    conversation,
    conversation_turn,
    resolved,
    response_of,
    store_end,
    stored_items,
)
from quintet.frontend.api.responses.stored import write_events
from quintet.frontend.api.responses.types import InputItem, ResponsesBody
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.response_store import IN_PROGRESS, QUEUED, Record, ResponseFile, ResponseStore
from quintet.frontend.resume.stream_state import resume_token_for
from quintet.frontend.resume.token_relay import PartialResponse, resume_state
from quintet.frontend.service import Service
from quintet.wire.codec import pack_i32
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.messages import ChatPrompt
from quintet.wire.params import SamplingParams, shown
from quintet.wire.request import OutputParsing, RequestSpec, ResumeToken, name_in_responses

ID_BYTES = 24
RESPONSE_ID = re.compile(r"resp_[0-9a-f]{48}")
PLACE = re.compile(r"input\[(\d+)\]")
_decoder = msgspec.json.Decoder(ResponsesBody)


@dataclass(slots=True)
class CheckedRequest:
    """A checked request."""

    body: ResponsesBody
    items: list[InputItem]
    """Input items of the request itself."""
    prompt: ChatPrompt
    params: SamplingParams
    parsing: OutputParsing | None
    answer: ResponsesAnswer
    deadline_ns: int

    @property
    def response_id(self) -> str:
        return self.answer.options.response_id


async def responses(service: Service, http_request: HttpRequest) -> None:
    body = await parse.read_body(service, http_request, _decoder)
    checked = await _read(service, http_request, body)
    if not checked.answer.is_stored:
        await _answer(service, http_request, checked)
        return
    service.admission.check([checked.prompt], checked.params)  # before the first write to the store
    record = Record(
        checked.response_id,
        service.responses.owner(service.me),
        QUEUED if body.background else IN_PROGRESS,
        background=bool(body.background),
        streams=bool(body.background and body.stream),
        previous=body.previous_response_id,
        items=encode_json(stored_items(checked.items, checked.response_id)),
        answer=msgspec.msgpack.encode(checked.answer),
    )
    is_new = await service.responses.do(functools.partial(_store_new, record, http_request.partial_response))
    try:
        if body.background:
            await _answer_later(service, http_request, checked, record)
        else:
            await _answer(service, http_request, checked)
    except BaseException:
        await _discard(service, http_request, checked, is_new)
        raise
    if body.background and body.stream:
        await write_events(service, http_request, record, 0)
    elif body.background:
        await http_request.respond(200, response_of(record))


def _store_new(record: Record, partial: PartialResponse | None, file: ResponseFile) -> bool:
    """Store a response; return False if it exists: this server may be the one that failed, with its store intact."""
    if partial is not None and file.find(record.id) is not None:
        return False
    file.insert(record)
    return True


async def _read(service: Service, http_request: HttpRequest, body: ResponsesBody) -> CheckedRequest:
    """Check a request, and read the conversation before it."""
    config, store = service.config, service.responses
    if http_request.partial_response is not None:
        _check_partial(http_request.partial_response, body)
    is_stored = store.is_enabled and body.store is not False
    if body.background and not is_stored:
        reason = (
            "store is false" if store.is_enabled else "this server stores none (--response-store-entries 0)"
        )
        raise invalid(
            f"background is true, but the response would not be stored: {reason}. Leave background out.",
            "background",
        )
    try:
        named = conversation_of(body)
        if named and not is_stored:
            raise invalid(
                "conversation was sent, but the response is not stored; leave out store: false, or send the items "
                "as input.",
                "conversation",
            )
        items, former = await _items_of(store, body, named)
        chat, translation, forms = chat_body(body, [*former, *items])
        read, params, parsing = checked_chat(chat, config, _own_locations(translation, len(former)))
        parse.reject_unsupported(chat)
    except RequestError as error:
        raise parse.renamed(error, CLIENT_NAMES) from None
    partial = http_request.partial_response
    options = AnswerOptions(
        response_id=f"resp_{secrets.token_hex(ID_BYTES)}" if partial is None else partial.name,
        created=int(time.time()) if partial is None else partial.created,
        model=name_in_responses(config.model, body.model),
        num_choices=1,
        logprobs=params.logprobs,
        max_alternatives=parse.max_alternatives(params),
    )
    head = {
        "id": options.response_id,
        "object": "response",
        "created_at": options.created,
        "model": options.model,
        "background": bool(body.background),
        "store": is_stored,
        **({"conversation": {"id": named}} if named else {}),
        **echo_of(body, params),
    }
    channels = channels_of(chat, read, options.response_id, config, http_request)
    has_state = REASONING_STATE in (body.include or ())
    answer = ResponsesAnswer(
        1, 1, 1, options, channels, encode_json(head), is_stored, named, forms, has_state
    )
    deadline_ns = parse.deadline_ns(chat, http_request)
    return CheckedRequest(body, items, read.prompt, params, parsing, answer, deadline_ns)


def _check_partial(partial: PartialResponse, body: ResponsesBody) -> None:
    """Reject a response that cannot be continued. Raises `RequestError`."""
    if RESPONSE_ID.fullmatch(partial.name) is None:
        raise invalid(
            f"name is {shown(partial.name)}; it must be the response id of the header X-Quintet-Relay.",
            "name",
        )
    if body.background:
        raise invalid(
            "request is a background response; read its events by the response id.",
            "background",
        )
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        raise invalid(
            "request asks for log-probabilities, which cannot be continued; send it again to its path.",
            "top_logprobs",
        )


async def _items_of(
    store: ResponseStore, body: ResponsesBody, named: str | None
) -> tuple[list[InputItem], list[InputItem]]:
    """Return a request's own items, and those of the conversation before it."""
    former = await (items_so_far(store, named) if named else conversation(store, body.previous_response_id))
    return await resolved(store, items_of(body), former), former


def _own_locations(translation: Translation, num_former: int) -> Translation:
    """Renumber the item locations in error messages to the request's own items."""

    def own(place: str) -> str:
        match = PLACE.fullmatch(place)
        if match is None or not num_former:
            return place
        index = int(match[1]) - num_former
        return f"input[{index}]" if index >= 0 else f"item {match[1]} of the conversation so far"

    return replace(translation, message_names=[own(place) for place in translation.message_names])


async def render_responses(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /v1/responses/render: return the request in token ids; stores nothing."""
    body = await parse.read_body(service, http_request, _decoder)
    try:
        chat, prompt, params = await _chat_of(service, body)
        await respond_rendered(service, http_request, chat, prompt, params)
    except RequestError as error:
        raise parse.renamed(error, CLIENT_NAMES) from None


async def count_input_tokens(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /v1/responses/input_tokens: return the number of prompt tokens; stores nothing."""
    body = await parse.read_body(service, http_request, _decoder)
    try:
        _, prompt, _ = await _chat_of(service, body)
        counted = await num_tokens(service, prompt)
    except RequestError as error:
        raise parse.renamed(error, CLIENT_NAMES) from None
    await http_request.respond_json({"object": "response.input_tokens", "input_tokens": counted})


async def _chat_of(service: Service, body: ResponsesBody) -> tuple[ChatBody, ChatPrompt, SamplingParams]:
    """Check a request that is not computed; return it as a chat body, and its prompt and parameters."""
    items, former = await _items_of(service.responses, body, conversation_of(body))
    chat, translation, _ = chat_body(body, [*former, *items])
    read, params, _ = checked_chat(chat, service.config, _own_locations(translation, len(former)))
    parse.reject_unsupported(chat)
    return chat, read.prompt, params


def _submit(
    service: Service,
    checked: CheckedRequest,
    http_request: HttpRequest,
    resume_token: ResumeToken | None,
    replayed_ids: bytes = b"",
) -> Submissions:
    body = checked.body
    return submit_all(
        service,
        http_request,
        body,
        [checked.prompt],
        RequestSpec(
            checked.params,
            http_request.arrival_ns,
            deadline_ns=checked.deadline_ns,
            resume_token=resume_token,
            parsing=checked.parsing,
            output_ids=replayed_ids,
            replays=bool(replayed_ids),
        ),
        clamp_max_tokens=True,  # max_output_tokens is an upper bound
        session=session_of(http_request, body.prompt_cache_key, body.user),
    )


async def _answer(service: Service, http_request: HttpRequest, checked: CheckedRequest) -> None:
    """Answer a waiting client."""
    answer, is_resumable = checked.answer, checked.body.stream and http_request.reads_event_ids
    resume_token = resume_token_for(answer, service.config) if is_resumable else None
    position, replayed_ids = None, b""
    if http_request.partial_response is not None:
        seeds, position, received = resume_state(http_request.partial_response, 1, 1)
        replayed_ids = pack_i32(received[0][0][0] or ())
        checked.params = msgspec.structs.replace(checked.params, seed=seeds[0])
    submissions = _submit(service, checked, http_request, resume_token, replayed_ids)
    if checked.body.stream:
        writer = ResponsesWriter(answer, submissions.stream_id, position)
        writer.sends_keep_alive_events = _is_codex(http_request)
        try:
            await stream_answer(service, http_request, submissions, writer, store_end)
        except RequestError as error:
            if http_request.started or error.code is not ErrorCode.TOO_LONG or not _is_codex(http_request):
                raise
            events = writer.failed_at_start(error)
            await store_end(service, writer)
            await http_request.start_stream(sse.CONTENT_TYPE, sse.HEADERS)
            await http_request.write(events, last=True)
        return
    (whole,) = await collect_outputs(http_request, submissions)
    status, response = response_of_output(answer, whole)
    if answer.is_stored:
        turn = conversation_turn(answer, status, response)
        await service.responses.do(
            lambda file: file.finish(checked.response_id, status, response, is_open=True, turn=turn)
        )
    await http_request.respond(200, response)


def _is_codex(http_request: HttpRequest) -> bool:
    """Return whether the client is Codex.

    It compacts a conversation that exceeds the context after ``response.failed``, but ends the turn after status 400. It
    ends a stream that has no event, only comments, for 300 s.
    """
    return (http_request.header("originator") or "").lower().startswith("codex")


async def _answer_later(
    service: Service, http_request: HttpRequest, checked: CheckedRequest, record: Record
) -> None:
    """Start a background response."""
    resume_token = resume_token_for(checked.answer, service.config)
    submissions = wake_on_start(_submit(service, checked, http_request, resume_token))
    with submissions:
        await note_request(service, record, submissions)
    start(service, record.id, run(service, record, submissions, ResponsesWriter(checked.answer)))


async def _discard(
    service: Service, http_request: HttpRequest, checked: CheckedRequest, is_new: bool
) -> None:
    """Delete a response that no client received; cancel it after a disconnect, unless the client resumes."""
    response_id = checked.response_id
    if not http_request.started and is_new:
        await service.responses.do(lambda file: file.delete(response_id))
        return
    response = response_json(checked.answer.head, CANCELLED, [])
    await service.responses.do(lambda file: file.finish(response_id, CANCELLED, response, is_open=True))
