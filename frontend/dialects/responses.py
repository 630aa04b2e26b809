"""POST /v1/responses."""

from __future__ import annotations

import secrets
import time

import msgspec

from quintet.frontend.dialects import openai_parse as parse
from quintet.frontend.dialects.answer import Submissions, stream_answer, whole_answer
from quintet.frontend.dialects.claims import claim_for
from quintet.frontend.dialects.openai_answer import AnswerOptions, encode_json
from quintet.frontend.dialects.openai_chat import channels_of, chat_params, check_chat, parse_conversation
from quintet.frontend.dialects.openai_tools import reading_of
from quintet.frontend.dialects.position import StreamId
from quintet.frontend.dialects.responses_events import ResponsesWriter, response_of
from quintet.frontend.dialects.responses_output import ResponsesAnswer
from quintet.frontend.dialects.responses_parse import THEIR_NAMES, chat_body, echo_of, items_of
from quintet.frontend.dialects.responses_types import ResponsesBody
from quintet.frontend.exchange import Exchange
from quintet.frontend.service import Service
from quintet.wire.errors import RequestError

ID_BYTES = 24
_decoder = msgspec.json.Decoder(ResponsesBody)


async def responses(service: Service, exchange: Exchange) -> None:
    """Answer one request."""
    config = service.config
    body = parse.decode(await exchange.read_json_body(service.bodies), _decoder)
    parse.check_model(body.model, config.model)
    try:
        chat = chat_body(body, items_of(body))
        check_chat(chat, config)
        conversation = parse_conversation(chat, config)
        params = chat_params(chat, config)
        reading = reading_of(chat, conversation.prompt.tools, config.model.parsers)
        parse.refuse_missing(chat)
    except RequestError as error:
        raise parse.renamed(error, THEIR_NAMES) from None
    options = AnswerOptions(
        response_id=f"resp_{secrets.token_hex(ID_BYTES)}",
        created=int(time.time()),
        model=config.model.served_names[0],
        num_choices=1,
        logprobs=params.logprobs,
        max_alternatives=parse.max_alternatives(params),
    )
    channels = channels_of(chat, conversation, options.response_id, config)
    head = {
        "id": options.response_id,
        "object": "response",
        "created_at": options.created,
        "model": options.model,
        "background": False,
        "store": False,
        **echo_of(body, params.temperature, params.top_p),
    }
    answer = ResponsesAnswer(1, 1, 1, options, channels, encode_json(head))
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
            limit_gives_way=True,  # what is asked for is an upper bound
            reading=reading,
        )
    )
    if body.stream:
        stream_id = None if claim is None else StreamId(submissions.streams[0].request_id, claim.key)
        await stream_answer(service, exchange, submissions, ResponsesWriter(answer, stream_id))
    else:
        (output,) = await whole_answer(exchange, submissions)
        await exchange.respond(200, response_of(answer, output))
