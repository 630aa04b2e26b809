"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from quintet.frontend.api.answer import Submissions, session_of, stream_answer, submit_all
from quintet.frontend.api.channels import Channels, channels_of
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import (
    AnswerOptions,
    ChunkFormat,
    ChunkWriter,
    encode_json,
    finish_name,
    head_of,
    metrics_of,
    options_of,
    token_ids_json,
    usage_of,
)
from quintet.frontend.api.openai.best_of import BeamRequest, beam_answer, best_choices, rankable, stream_beams
from quintet.frontend.api.openai.chat_body import checked_chat, prompt_of, reject_unsupported
from quintet.frontend.api.openai.kv_transfer_params import take_kv_transfer, with_params
from quintet.frontend.api.openai.logprobs import chat_logprobs, prompt_logprobs
from quintet.frontend.api.openai.redetokenize import replay_usage
from quintet.frontend.api.openai.types import ChatBody
from quintet.frontend.api.outputs import Output, collect_outputs
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.stream_state import FROM_START, Answer, StreamCursor, StreamId, resume_token_for
from quintet.frontend.resume.token_relay import enable_relay, resume_state
from quintet.frontend.service import Service
from quintet.frontend.streams import OutputDelta
from quintet.wire.channels import TextSpan
from quintet.wire.codec import unpack_i32
from quintet.wire.messages import Started
from quintet.wire.request import RequestSpec

_decoder = msgspec.json.Decoder(ChatBody)


class ChatAnswer(Answer, tag="chat"):
    """Event format of a chat response."""

    options: AnswerOptions
    role: str
    """Role of the response's message."""
    prefix: str
    """Text echoed before the output."""
    channels: Channels | None = None
    """Set if parsers read the output."""


async def chat_completions(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /v1/chat/completions."""
    config = service.config
    body = await parse.read_body(service, http_request, _decoder)
    conversation, params, parsing = checked_chat(body, config)
    prompt = prompt_of(body, conversation, config)
    options = options_of("chatcmpl", body, params, http_request, config)
    prefix, interval = conversation.last_text if options.echo else "", body.stream_interval or 1
    reply_id = options.response_id
    channels = None if parsing is None else channels_of(body, conversation, reply_id, config, http_request)
    answer = ChatAnswer(1, params.n, interval, options, conversation.role, prefix, channels)
    resume_token = resume_token_for(answer, config) if body.stream and http_request.reads_event_ids else None
    deadline_ns = parse.deadline_ns(body, http_request)
    kv_transfer = take_kv_transfer(body, 1, config) if body.kv_transfer_params else None
    reject_unsupported(body)
    session, is_clamped = session_of(http_request, body.session_id, body.user), parse.has_upper_bound(body)
    if body.use_beam_search:
        request = BeamRequest(
            [prompt], body, params, "messages", is_clamped, options, deadline_ns, session, parsing
        )
        if body.stream:
            shape = chat_shape(answer.role, prefix, channels)
            await stream_beams(service, http_request, request, functools.partial(ChunkWriter, shape))
            return
        outputs, submissions = await beam_answer(service, http_request, request)
        await http_request.respond_json(_response_json(outputs, submissions, answer))
        return
    earlier = http_request.partial_response
    seeds, position, received = FROM_START if earlier is None else resume_state(earlier, params.n, 1)
    submissions = submit_all(
        service,
        body,
        [prompt],
        RequestSpec(
            params if body.best_of is None else rankable(params, body),
            http_request.arrival_ns,
            deadline_ns=deadline_ns,
            resume_token=resume_token,
            parsing=parsing,
            return_prompt_ids=options.return_token_ids,
            kv_transfer=kv_transfer,
        ),
        clamp_max_tokens=is_clamped,
        interval=interval,
        session=session,
        received=received,
        seeds=seeds,
    )
    if http_request.partial_response is not None and options.include_usage:
        await replay_usage(service, submissions)
    if body.stream:
        chunks = writer(answer, submissions.stream_id, position)
        if http_request.wants_relay:
            enable_relay(http_request, chunks, submissions)
        await stream_answer(service, http_request, submissions, chunks)
    else:
        outputs = best_choices(await collect_outputs(http_request, submissions), body)
        whole = _response_json(outputs, submissions, answer)
        await http_request.respond_json(with_params(whole, submissions.streams, config))


def chat_shape(role: str, prefix: str, channels: Channels | None = None) -> ChunkFormat:
    """Return the chunk format; the first events have the role and the echoed text."""

    def by_channel(answer_channels: Channels, index: int, delta: OutputDelta) -> list[bytes]:
        found = answer_channels.split(index, delta.text, delta.spans).deltas()
        return [b'"delta":' + encode_json(each) if each else b"" for each in found]

    def on_start(writer: ChunkWriter, index: int, started: Started) -> list[bytes]:
        first = b'{"index":%d,"delta":{"role":' + encode_json(role).replace(b"%", b"%%")
        # No token_ids here: clients concatenate id lists.
        first += b',"content":""},"logprobs":null,"finish_reason":null}'
        ids = encode_json(list(unpack_i32(started.prompt_ids)) if writer.options.return_token_ids else None)
        usage = writer.usage_at_start(started)
        frames = [writer.raw_choice(first % index, b',"prompt_token_ids":' + ids, usage)]
        return [*frames, writer.chunk(index, prefix, usage=usage)] if prefix else frames

    return ChunkFormat(
        head=head_of("chat.completion.chunk"),
        open=b'"delta":{"content":',
        close=b"}",
        plain_end=b',"logprobs":null,"finish_reason":null,"token_ids":null',
        logprobs=chat_logprobs,
        ids=lambda token_ids, _: token_ids_json(token_ids),  # the first event has the prompt's ids
        on_start=on_start,
        channels=None if channels is None else functools.partial(by_channel, channels),
    )


def writer(
    answer: ChatAnswer, stream_id: StreamId | None, position: StreamCursor | None = None
) -> ChunkWriter:
    """Return the event writer of a chat response."""
    shape = chat_shape(answer.role, answer.prefix, answer.channels)
    return ChunkWriter(shape, answer.options, answer.num_prompts, stream_id, position)


def _response_json(outputs: list[Output], submissions: Submissions, how: ChatAnswer) -> dict[str, object]:
    options = how.options
    started = submissions.streams[0].started
    answer: dict[str, object] = {
        "id": options.response_id,
        "object": "chat.completion",
        "created": options.created,
        "model": options.model,
        "choices": [choice_of(output, how) for output in outputs],
        "usage": usage_of(submissions.streams, streams_per_prompt=submissions.streams_per_prompt),
        "prompt_logprobs": prompt_logprobs(started, options) if started is not None else None,
    }
    if options.num_spec_tokens is not None:
        answer["metrics"] = metrics_of(submissions.streams, options.num_spec_tokens)
    with_ids = started is not None and options.return_token_ids
    answer["prompt_token_ids"] = list(unpack_i32(started.prompt_ids)) if started and with_ids else None
    return answer


def message_of(index: int, text: str, spans: Sequence[TextSpan], how: ChatAnswer) -> dict[str, object]:
    """Return the message of an unstreamed choice."""
    if how.channels is None:
        return {"role": how.role, "content": how.prefix + text, "refusal": None}
    return how.channels.split(index, text, spans).message(how.role, how.prefix)


def choice_of(output: Output, how: ChatAnswer) -> dict[str, object]:
    """Return one unstreamed choice."""
    options = how.options
    choice: dict[str, object] = {
        "index": output.index,
        "message": message_of(output.index, output.text, output.spans, how),
        "logprobs": chat_logprobs(output.logprobs, options) if options.logprobs is not None else None,
        "finish_reason": finish_name(output.finish),
        "stop_reason": output.finish.stop_reason,
    }
    choice["token_ids"] = list(output.token_ids) if options.return_token_ids else None
    return choice
