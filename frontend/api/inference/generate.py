"""POST /inference/v1/generate: token ids in, token ids out, for clients with their own tokenizer."""

from __future__ import annotations

import msgspec

from quintet.frontend.api.answer import Submissions, session_of, stream_answer, submit_all
from quintet.frontend.api.inference.types import GenerateBody
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import (
    AnswerOptions,
    ChunkFormat,
    ChunkWriter,
    encode_json,
    finish_name,
    options_of,
    usage_of,
)
from quintet.frontend.api.openai.completions import token_prompt
from quintet.frontend.api.openai.logprobs import chat_logprobs, prompt_logprobs
from quintet.frontend.api.openai.types import CompletionBody
from quintet.frontend.api.outputs import Output, collect_outputs
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.stream_state import FROM_START, Answer, StreamCursor, StreamId, resume_token_for
from quintet.frontend.resume.token_relay import enable_relay, resume_state
from quintet.frontend.service import Service
from quintet.wire.config import EngineConfig
from quintet.wire.errors import invalid
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec

_decoder = msgspec.json.Decoder(GenerateBody)
_fields_decoder = msgspec.json.Decoder(CompletionBody)


class GenerateAnswer(Answer, tag="generate"):
    """Event format of a response in token ids."""

    options: AnswerOptions


async def generate(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /inference/v1/generate."""
    config = service.config
    body = await parse.read_body(service, http_request, _decoder)
    fields = sampling_fields(body)
    parse.check_combinations(fields, config)
    prompt = token_prompt(body.token_ids, fields.truncate_prompt_tokens, config.model, "token_ids")
    params = _params(fields, config)
    options = msgspec.structs.replace(
        options_of("", fields, params, http_request, config),
        response_id=parse.request_id(fields, http_request),
        return_token_ids=True,
    )
    interval = body.stream_interval or 1
    answer = GenerateAnswer(1, params.n, interval, options)
    resume_token = resume_token_for(answer, config) if body.stream and http_request.reads_event_ids else None
    deadline_ns = parse.deadline_ns(fields, http_request)
    _reject_unsupported(body, fields)
    earlier = http_request.partial_response
    seeds, position, received = FROM_START if earlier is None else resume_state(earlier, params.n, 1)
    submissions = submit_all(
        service,
        body,
        [prompt],
        RequestSpec(
            params,
            http_request.arrival_ns,
            deadline_ns=deadline_ns,
            resume_token=resume_token,
        ),
        clamp_max_tokens=fields.max_tokens is None,
        interval=interval,
        session=session_of(http_request),
        received=received,
        seeds=seeds,
    )
    if body.stream:
        chunks = writer(answer, submissions.stream_id, position)
        if http_request.wants_relay:
            enable_relay(http_request, chunks, submissions)
        await stream_answer(service, http_request, submissions, chunks)
    else:
        outputs = await collect_outputs(http_request, submissions)
        await http_request.respond_json(_response_json(outputs, submissions, options))


def sampling_fields(body: GenerateBody) -> CompletionBody:
    """Return the body's sampling parameters as fields of a completion request."""
    fields = CompletionBody()
    given = parse.json_of(body.sampling_params)
    if given:
        if not given.startswith(b"{"):
            raise invalid("sampling_params must be an object; send one, or leave it out.", "sampling_params")
        fields = parse.decode(given, _fields_decoder)
    fields.echo = fields.detokenize = None  # the response has no text
    for name in GenerateBody.__struct_fields__:
        if name in CompletionBody.__struct_fields__:
            setattr(fields, name, getattr(body, name))
    return fields


def _params(fields: CompletionBody, config: EngineConfig) -> SamplingParams:
    """Return the checked parameters. Output is detokenized only for stop strings."""
    model = config.model
    params = parse.sampling_params(fields, model, max_tokens=fields.max_tokens, logprobs=fields.logprobs)
    params.detokenize = bool(params.stop)
    return parse.checked(params, config.frontend.max_logprobs, model, {})


def _reject_unsupported(body: GenerateBody, fields: CompletionBody) -> None:
    for name, raw in (("features", body.features), ("content_parts", body.content_parts)):
        if parse.json_of(raw) not in {b"", b"{}", b"[]"}:
            raise parse.not_implemented(name, "input other than text", "Leave it out.")
    parse.reject_unsupported(fields)
    parse.reject_search(fields)


SHAPE = ChunkFormat(
    head=lambda options: {"request_id": options.response_id},
    open=b'"token_ids":',
    close=b"",
    plain_end=b"",
    logprobs=chat_logprobs,
    ids=lambda token_ids, prompt_ids: b"",
    on_start=lambda writer, index, started: [],
    channels=lambda index, delta: [b'"token_ids":' + encode_json(list(delta.token_ids))],
)


def writer(
    answer: GenerateAnswer, stream_id: StreamId | None, position: StreamCursor | None = None
) -> ChunkWriter:
    """Return the event writer of a response."""
    return ChunkWriter(SHAPE, answer.options, answer.num_prompts, stream_id, position)


def _response_json(
    outputs: list[Output], submissions: Submissions, options: AnswerOptions
) -> dict[str, object]:
    started = submissions.streams[0].started
    return {
        "request_id": options.response_id,
        "choices": [
            {
                "index": output.index,
                "logprobs": chat_logprobs(output.logprobs, options) if options.logprobs is not None else None,
                "finish_reason": finish_name(output.finish),
                "stop_reason": output.finish.stop_reason,
                "token_ids": list(output.token_ids),
            }
            for output in outputs
        ],
        "prompt_logprobs": prompt_logprobs(started, options) if started is not None else None,
        "usage": usage_of(submissions.streams),
        "kv_transfer_params": None,
    }
