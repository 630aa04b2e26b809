"""POST /v1/chat/completions/batch: several conversations in one request, with shared parameters."""

from __future__ import annotations

import msgspec

from quintet.frontend.api.answer import session_of, submit_all
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import options_of, usage_of
from quintet.frontend.api.openai.chat import ChatAnswer, answer_of, choice_of
from quintet.frontend.api.openai.chat_body import (
    Conversation,
    check_chat,
    params_and_parsing,
    parse_conversation,
    reject_unsupported,
)
from quintet.frontend.api.openai.logprobs import prompt_logprobs
from quintet.frontend.api.openai.types import ChatBody
from quintet.frontend.api.outputs import Output, collect_outputs
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.codec import unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.errors import invalid
from quintet.wire.request import RequestSpec

_decoder = msgspec.json.Decoder(ChatBody)


async def batch(service: Service, http_request: HttpRequest) -> None:
    """Handle a batch. Choices are numbered consecutively, those of the first conversation first."""
    config = service.config
    body = await parse.read_body(service, http_request, _decoder)
    check_chat(body, config)
    if body.prompt_token_ids is not None:
        raise invalid(
            "prompt_token_ids is a single prompt, but a batch has several; leave it out.", "prompt_token_ids"
        )
    conversations = _conversations(body, config)
    params, parsing = params_and_parsing(body, conversations[0].tools, config)
    options = options_of("chatcmpl", body, params, http_request, config)
    deadline_ns = parse.deadline_ns(body, http_request)
    reject_unsupported(body)
    parse.reject_search(body)
    submissions = submit_all(
        service,
        http_request,
        body,
        [each.prompt for each in conversations],
        RequestSpec(
            params,
            http_request.arrival_ns,
            deadline_ns=deadline_ns,
            parsing=parsing,
            return_prompt_ids=options.return_token_ids,
        ),
        clamp_max_tokens=parse.has_upper_bound(body),
        session=session_of(http_request, body.session_id, body.user),
    )
    outputs = await collect_outputs(http_request, submissions)
    answers = [
        answer_of(body, each, options, http_request, config, has_channels=parsing is not None)
        for each in conversations
    ]
    await http_request.respond_json(
        {
            **options.head("chat.completion"),
            "choices": [_choice(output, answers[output.index // params.n]) for output in outputs],
            "usage": usage_of(submissions.streams),
        }
    )


def _conversations(body: ChatBody, config: EngineConfig) -> list[Conversation]:
    if body.stream:
        raise invalid(
            "stream is true, but a batch cannot be streamed; send each conversation to /v1/chat/completions.",
            "stream",
        )
    if not body.messages:
        raise invalid("messages is []; it must hold at least one conversation.", "messages")
    return [
        parse_conversation(msgspec.structs.replace(body, messages=each), config) for each in body.messages
    ]


def _choice(output: Output, how: ChatAnswer) -> dict[str, object]:
    """Return a choice, with the response fields that depend on its conversation."""
    started, options = output.stream.started, how.options
    assert started is not None, f"choice {output.index} has ended but not started"
    return {
        **choice_of(output, how),
        "prompt_logprobs": prompt_logprobs(started, options),
        "prompt_token_ids": list(unpack_i32(started.prompt_ids)) if options.return_token_ids else None,
    }
