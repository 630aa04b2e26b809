"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import msgspec

from quintet.frontend.dialects.answer import Submissions, stream_answer, whole_answer
from quintet.frontend.dialects.anthropic.events import MessagesAnswer, MessagesWriter, message_of
from quintet.frontend.dialects.anthropic.parse import THEIR_NAMES, chat_body
from quintet.frontend.dialects.anthropic.types import CountTokensBody, MessagesBody
from quintet.frontend.dialects.claims import claim_for
from quintet.frontend.dialects.openai import parse
from quintet.frontend.dialects.openai.chat import (
    channels_of,
    chat_params,
    check_chat,
    parse_conversation,
)
from quintet.frontend.dialects.openai.tools import reading_of
from quintet.frontend.dialects.position import StreamId
from quintet.frontend.exchange import Exchange
from quintet.frontend.service import Service
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import RequestError

_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountTokensBody)


async def messages(service: Service, exchange: Exchange) -> None:
    """Answer one request."""
    config = service.config
    body = parse.decode(await exchange.read_json_body(service.bodies), _decoder)
    parse.check_model(body.model, config.model)
    chat = chat_body(body)
    if body.thinking is not None and config.model.parsers.thinks is not None:
        chat.thinking_token_budget = body.thinking.budget_tokens
    try:
        check_chat(chat, config)
        conversation = parse_conversation(chat, config)
        params = chat_params(chat, config)
        reading = reading_of(chat, conversation.prompt.tools, config.model.parsers)
    except RequestError as error:
        raise parse.renamed(error, THEIR_NAMES) from None
    request_id = parse.request_id(chat, exchange)
    channels = channels_of(chat, conversation, request_id, config)
    answer = MessagesAnswer(1, 1, 1, request_id, config.model.served_names[0], body.max_tokens, channels)
    claim = claim_for(answer, config) if body.stream else None
    deadline_ns = parse.deadline_ns(chat, exchange)
    service.admission.enter([conversation.prompt], params)
    submissions = Submissions()
    submissions.add(
        service.sessions.submit(
            conversation.prompt,
            params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            arrival_ns=exchange.arrival_ns,
            mailbox=submissions.mailbox,
            final_only=not body.stream,
            are_checked=True,
            claim=claim,
            deadline_ns=deadline_ns,
            limit_gives_way=True,  # required by the dialect, so it says little: the context is a limit too
            reading=reading,
        )
    )
    if body.stream:
        stream_id = None if claim is None else StreamId(submissions.streams[0].request_id, claim.key)
        await stream_answer(service, exchange, submissions, MessagesWriter(answer, stream_id))
    else:
        (output,) = await whole_answer(exchange, submissions)
        await exchange.respond_json(message_of(answer, output))


async def count_tokens(service: Service, exchange: Exchange) -> None:
    """Answer with the tokens of the prompt that a request would have."""
    config = service.config
    body = parse.decode(await exchange.read_json_body(service.bodies), _count_decoder)
    parse.check_model(body.model, config.model)
    prompt = parse_conversation(chat_body(body), config).prompt
    counted = await service.queries.tokenize(prompt)
    await exchange.respond_json({"input_tokens": len(unpack_i32(counted.token_ids))})
