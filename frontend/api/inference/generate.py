"""POST /inference/v1/generate: token ids in, token ids out, for clients with their own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quintet.frontend.api.answer import Submissions, session_of
from quintet.frontend.api.inference.types import GenerateBody
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import (
    ChunkAnswer,
    ChunkFormat,
    encode_json,
    finish_name,
    options_of,
    usage_of,
)
from quintet.frontend.api.openai.generation import GenerationRequest, answer_generation
from quintet.frontend.api.openai.logprobs import chat_logprobs, prompt_logprobs
from quintet.frontend.api.openai.prompts import token_prompt
from quintet.frontend.api.openai.types import CompletionBody
from quintet.frontend.api.outputs import Output
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.config import EngineConfig
from quintet.wire.errors import invalid
from quintet.wire.params import SamplingParams

_decoder = msgspec.json.Decoder(GenerateBody)
_fields_decoder = msgspec.json.Decoder(CompletionBody)


class GenerateAnswer(ChunkAnswer, tag="generate"):
    """Format of a response in token ids."""

    def shape(self) -> ChunkFormat:
        return SHAPE

    def whole(self, outputs: Sequence[Output], submissions: Submissions) -> dict[str, object]:
        options, started = self.options, submissions.streams[0].started
        return {
            "request_id": options.response_id,
            "choices": [
                {
                    "index": output.index,
                    "logprobs": None if options.logprobs is None else chat_logprobs(output.logprobs, options),
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


async def generate(service: Service, http_request: HttpRequest) -> None:
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
    deadline_ns = parse.deadline_ns(fields, http_request)
    _reject_unsupported(body, fields)
    request = GenerationRequest(
        fields,
        [prompt],
        "token_ids",
        params,
        GenerateAnswer(1, params.n, body.stream_interval or 1, options),
        fields.max_tokens is None,
        deadline_ns,
        session_of(http_request),
    )
    await answer_generation(service, http_request, request)


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
