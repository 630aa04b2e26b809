"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from quintet.frontend.api.answer import Submissions, session_of
from quintet.frontend.api.channels import Channels, channels_of
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import (
    AnswerOptions,
    ChunkAnswer,
    ChunkFormat,
    ChunkWriter,
    encode_json,
    finish_name,
    metrics_of,
    options_of,
    token_ids_json,
    usage_of,
)
from quintet.frontend.api.openai.beams import answer_beams
from quintet.frontend.api.openai.chat_body import Conversation, checked_chat, prompt_of, reject_unsupported
from quintet.frontend.api.openai.generation import GenerationRequest, answer_generation
from quintet.frontend.api.openai.kv_transfer_params import take_kv_transfer
from quintet.frontend.api.openai.logprobs import chat_logprobs, prompt_logprobs
from quintet.frontend.api.openai.types import ChatBody
from quintet.frontend.api.outputs import Output
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.service import Service
from quintet.frontend.streams import OutputDelta
from quintet.wire.channels import TextSpan
from quintet.wire.codec import unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.messages import Started

_decoder = msgspec.json.Decoder(ChatBody)


class ChatAnswer(ChunkAnswer, tag="chat"):
    """Format of a chat response."""

    role: str
    """Role of the response's message."""
    prefix: str
    """Text echoed before the output."""
    channels: Channels | None = None
    """Set if parsers read the output."""

    def shape(self) -> ChunkFormat:
        """See `ChunkAnswer.shape`. The first events have the role and the echoed text."""
        channels = self.channels
        return ChunkFormat(
            head=lambda options: options.head("chat.completion.chunk"),
            open=b'"delta":{"content":',
            close=b"}",
            plain_end=b',"logprobs":null,"finish_reason":null,"token_ids":null',
            logprobs=chat_logprobs,
            ids=lambda token_ids, _: token_ids_json(token_ids),  # the first event has the prompt's ids
            on_start=functools.partial(_on_start, self.role, self.prefix),
            channels=None if channels is None else functools.partial(_by_channel, channels),
        )

    def whole(self, outputs: Sequence[Output], submissions: Submissions) -> dict[str, object]:
        options, started = self.options, submissions.streams[0].started
        answer: dict[str, object] = {
            **options.head("chat.completion"),
            "choices": [choice_of(output, self) for output in outputs],
            "usage": usage_of(submissions.streams, streams_per_prompt=submissions.streams_per_prompt),
            "prompt_logprobs": prompt_logprobs(started, options) if started is not None else None,
        }
        if options.num_spec_tokens is not None:
            answer["metrics"] = metrics_of(submissions.streams, options.num_spec_tokens)
        with_ids = started is not None and options.return_token_ids
        answer["prompt_token_ids"] = list(unpack_i32(started.prompt_ids)) if started and with_ids else None
        return answer


async def chat_completions(service: Service, http_request: HttpRequest) -> None:
    config = service.config
    body = await parse.read_body(service, http_request, _decoder)
    conversation, params, parsing = checked_chat(body, config)
    prompt = prompt_of(body, conversation, config)
    options = options_of("chatcmpl", body, params, http_request, config)
    answer = answer_of(body, conversation, options, http_request, config, has_channels=parsing is not None)
    deadline_ns = parse.deadline_ns(body, http_request)
    kv_transfer = take_kv_transfer(body, 1, config) if body.kv_transfer_params else None
    reject_unsupported(body)
    request = GenerationRequest(
        body,
        [prompt],
        "messages",
        params,
        answer,
        parse.has_upper_bound(body),
        deadline_ns,
        session_of(http_request, body.session_id, body.user),
        parsing,
        kv_transfer,
    )
    await (answer_beams if body.use_beam_search else answer_generation)(service, http_request, request)


def answer_of(
    body: ChatBody,
    conversation: Conversation,
    options: AnswerOptions,
    http_request: HttpRequest,
    config: EngineConfig,
    *,
    has_channels: bool,
) -> ChatAnswer:
    """Return the format of the response to a conversation. ``has_channels``: parsers read the output."""
    return ChatAnswer(
        1,
        options.num_choices,
        body.stream_interval or 1,
        options,
        conversation.role,
        conversation.last_text if options.echo else "",
        channels_of(body, conversation, options.response_id, config, http_request) if has_channels else None,
    )


def _by_channel(channels: Channels, index: int, delta: OutputDelta) -> list[bytes]:
    found = channels.split(index, delta.text, delta.spans).deltas()
    return [b'"delta":' + encode_json(each) if each else b"" for each in found]


def _on_start(role: str, prefix: str, writer: ChunkWriter, index: int, started: Started) -> list[bytes]:
    """Return the events with the role and the echoed text."""
    first = b'{"index":%d,"delta":{"role":' + encode_json(role).replace(b"%", b"%%")
    # No token_ids here: clients concatenate id lists.
    first += b',"content":""},"logprobs":null,"finish_reason":null}'
    ids = encode_json(list(unpack_i32(started.prompt_ids)) if writer.options.return_token_ids else None)
    usage = writer.usage_at_start(started)
    frames = [writer.raw_choice(first % index, b',"prompt_token_ids":' + ids, usage)]
    return [*frames, writer.chunk(index, prefix, usage=usage)] if prefix else frames


def message_of(index: int, text: str, spans: Sequence[TextSpan], how: ChatAnswer) -> dict[str, object]:
    """Return the message of an unstreamed choice."""
    if how.channels is None:
        return {"role": how.role, "content": how.prefix + text, "refusal": None}
    return how.channels.split(index, text, spans).message(how.role, how.prefix)


def choice_of(output: Output, how: ChatAnswer) -> dict[str, object]:
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
