"""POST /v1/messages, /v1/messages/render and /v1/messages/count_tokens."""

from __future__ import annotations

import msgspec

from quintet.frontend.api.answer import session_of, stream_answer, submit_all
from quintet.frontend.api.anthropic.events import MessagesAnswer, MessagesWriter, message_of
from quintet.frontend.api.anthropic.parse import CLIENT_NAMES, chat_body
from quintet.frontend.api.anthropic.types import CountTokensBody, MessagesBody
from quintet.frontend.api.channels import channels_of
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.chat_body import Conversation, checked_chat, parse_conversation
from quintet.frontend.api.openai.prompts import num_tokens
from quintet.frontend.api.openai.render import respond_rendered
from quintet.frontend.api.openai.types import ChatBody
from quintet.frontend.api.outputs import collect_outputs
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.wire.config import EngineConfig
from quintet.wire.errors import RequestError
from quintet.wire.params import SamplingParams
from quintet.wire.request import OutputParsing, RequestSpec, name_in_responses

_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountTokensBody)


async def messages(service: Service, http_request: HttpRequest) -> None:
    config = service.config
    body = await parse.read_body(service, http_request, _decoder)
    chat, conversation, params, parsing = _checked(body, config)
    request_id = parse.request_id(chat, http_request)
    channels = channels_of(chat, conversation, request_id, config, http_request)
    name = name_in_responses(config.model, body.model)
    answer = MessagesAnswer(1, 1, 1, request_id, name, body.max_tokens, channels)
    deadline_ns = parse.deadline_ns(chat, http_request)
    submissions = submit_all(
        service,
        http_request,
        body,
        [conversation.prompt],
        RequestSpec(params, http_request.arrival_ns, deadline_ns=deadline_ns, parsing=parsing),
        answer=answer,
        clamp_max_tokens=True,  # max_tokens is required by the API; the context length limits too
        session=session_of(http_request),
    )
    if body.stream:
        writer = MessagesWriter(answer, submissions.stream_id, submissions.position)
        await stream_answer(service, http_request, submissions, writer)
    else:
        (output,) = await collect_outputs(http_request, submissions)
        await http_request.respond_json(message_of(answer, output))


async def render_messages(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /v1/messages/render: return the request in token ids."""
    body = await parse.read_body(service, http_request, _decoder)
    chat, conversation, params, _ = _checked(body, service.config)
    await respond_rendered(service, http_request, chat, conversation.prompt, params)


def _checked(
    body: MessagesBody, config: EngineConfig
) -> tuple[ChatBody, Conversation, SamplingParams, OutputParsing | None]:
    """Return the request as a chat body, and its conversation, parameters and output parsing."""
    chat, translation = chat_body(body)
    thinking = body.thinking
    if thinking is not None and thinking.type != "disabled" and config.model.parsers.thinks is not None:
        chat.thinking_token_budget = thinking.budget_tokens
    try:
        return chat, *checked_chat(chat, config, translation)
    except RequestError as error:
        raise parse.renamed(error, CLIENT_NAMES) from None


async def count_tokens(service: Service, http_request: HttpRequest) -> None:
    config = service.config
    body = await parse.read_body(service, http_request, _count_decoder)
    chat, translation = chat_body(body)
    prompt = parse_conversation(chat, config, translation).prompt
    await http_request.respond_json({"input_tokens": await num_tokens(service, prompt)})
