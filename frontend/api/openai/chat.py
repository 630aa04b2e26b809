"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quintet.frontend.api.answer import (
    Output,
    Submissions,
    collect_outputs,
    session_of,
    stream_answer,
    submit_all,
)
from quintet.frontend.api.channels import Channels
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
from quintet.frontend.api.openai.completions import token_prompt
from quintet.frontend.api.openai.kv_transfer_params import take_kv_transfer, with_params
from quintet.frontend.api.openai.logprobs import chat_logprobs, prompt_logprobs
from quintet.frontend.api.openai.offered_tools import AS_SENT, Translation, shown_tools, with_deferred
from quintet.frontend.api.openai.redetokenize import replay_usage
from quintet.frontend.api.openai.tools import check_tool_choice, params_and_reading
from quintet.frontend.api.openai.types import (
    ChatBody,
    TokenizeBody,
)
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.stream_state import Answer, StreamCursor, StreamId, resume_token_for
from quintet.frontend.resume.token_relay import resume_state, with_relay
from quintet.frontend.service import Service
from quintet.frontend.streams import OutputDelta
from quintet.wire.channels import Span
from quintet.wire.chat import ChatMessage, check_messages, encode_messages
from quintet.wire.codec import unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.messages import ChatPrompt, Started, TokenPrompt
from quintet.wire.params import SamplingParams, shown
from quintet.wire.request import OutputParsing, RequestSpec

_decoder = msgspec.json.Decoder(ChatBody)
_mapping_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any_decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(object)

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatAnswer(Answer, tag="chat"):
    """Event format of a chat response."""

    options: AnswerOptions
    role: str
    """Role of the response's message."""
    prefix: str
    """Text echoed before the output."""
    channels: Channels | None = None
    """Set if parsers read the output."""


@dataclass(slots=True)
class Conversation:
    """A checked prompt, and properties of its messages that the response needs."""

    prompt: ChatPrompt
    role: str
    """Role of the response's message."""
    last_text: str
    """Text of the last message, if it has the response's role."""
    num_calls: int
    """Tool calls in the messages."""
    tools: bytes
    """JSON of all tools that the model may call; the prompt has those that the template shows."""


async def chat_completions(service: Service, http_request: HttpRequest) -> None:
    """Handle POST /v1/chat/completions."""
    config = service.config
    body = await parse.read_body(service, http_request, _decoder)
    conversation, params, parsing = checked_chat(body, config)
    prompt = prompt_of(body, conversation, config)
    options = options_of("chatcmpl", body, params, http_request, config)
    prefix, interval = conversation.last_text if options.echo else "", body.stream_interval or 1
    channels = None if parsing is None else channels_of(body, conversation, options.response_id, config)
    answer = ChatAnswer(1, params.n, interval, options, conversation.role, prefix, channels)
    resume_token = resume_token_for(answer, config) if body.stream else None
    deadline_ns = parse.deadline_ns(body, http_request)
    kv_transfer = take_kv_transfer(body, 1, config)
    reject_unsupported(body)
    session = session_of(http_request, body.user)
    if body.use_beam_search:
        prompts, gives_way = [prompt], parse.chat_max_tokens(body) is None
        request = BeamRequest(
            prompts, body, params, "messages", gives_way, options, deadline_ns, session, parsing
        )
        if body.stream:
            shape = chat_shape(answer.role, prefix, channels)
            await stream_beams(service, http_request, request, functools.partial(ChunkWriter, shape))
            return
        outputs, submissions = await beam_answer(service, http_request, request)
        await http_request.respond_json(_response_json(outputs, submissions, answer))
        return
    seeds, position, received = resume_state(http_request.partial_response, params.n, 1)
    submissions = submit_all(
        service,
        body,
        [prompt],
        RequestSpec(
            rankable(params, body),
            http_request.arrival_ns,
            deadline_ns=deadline_ns,
            resume_token=resume_token,
            parsing=parsing,
            return_prompt_ids=options.return_token_ids,
            kv_transfer=kv_transfer,
        ),
        clamp_max_tokens=parse.chat_max_tokens(body) is None,
        interval=interval,
        session=session,
        received=received,
        seeds=seeds,
    )
    if http_request.partial_response is not None and options.include_usage:
        await replay_usage(service, submissions)
    if body.stream:
        chunks = writer(answer, submissions.stream_id, position)
        await stream_answer(service, http_request, submissions, with_relay(http_request, chunks, submissions))
    else:
        outputs = best_choices(await collect_outputs(http_request, submissions), body)
        whole = _response_json(outputs, submissions, answer)
        await http_request.respond_json(with_params(whole, submissions.streams, config))


def checked_chat(
    body: ChatBody, config: EngineConfig, translation: Translation = AS_SENT
) -> tuple[Conversation, SamplingParams, OutputParsing | None]:
    """Validate the body except unsupported fields; return prompt, parameters and output parsing."""
    check_chat(body, config)
    conversation = parse_conversation(body, config, translation)
    return conversation, *params_and_reading(body, conversation.tools, config)


def prompt_of(body: ChatBody, conversation: Conversation, config: EngineConfig) -> ChatPrompt | TokenPrompt:
    """Return the tokenizer's input: the conversation, or the client's ids for it. Raises `RequestError`."""
    ids = body.prompt_token_ids
    if ids is None:
        return conversation.prompt
    return token_prompt(ids, body.truncate_prompt_tokens, config.model, "prompt_token_ids")


def parse_conversation(
    body: ChatBody | TokenizeBody, config: EngineConfig, translation: Translation = AS_SENT
) -> Conversation:
    """Check messages, tools and template arguments; return the prompt."""
    _check_template(body.chat_template, config)
    messages, encoded = _read_messages(body.messages or [])
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        raise parse.invalid(
            "add_generation_prompt and continue_final_message are both true; set one of them to false.",
            "continue_final_message",
        )
    tools = shown_tools(body.tools)
    role = "assistant" if generates else messages[-1].role
    return Conversation(
        ChatPrompt(
            messages=encoded,
            tools=tools,
            template_kwargs=_template_kwargs(body, config.frontend.chat_template_kwargs),
            chat_template=body.chat_template,
            add_generation_prompt=generates,
            continue_final_message=continues,
            add_special_tokens=bool(body.add_special_tokens),
            message_names=list(translation.message_names),
        ),
        role,
        messages[-1].text if messages[-1].role == role else "",
        sum(len(message.tool_calls or ()) for message in messages),
        with_deferred(tools, translation.deferred),
    )


def channels_of(
    body: ChatBody, conversation: Conversation, response_id: str, config: EngineConfig
) -> Channels:
    """Return the output channels of a response."""
    return Channels(
        response_id,
        config.model.parsers.call_ids,
        conversation.num_calls,
        include_reasoning=body.include_reasoning is not False,
        parallel_calls=body.parallel_tool_calls is not False,
    )


def _check_template(template: str | None, config: EngineConfig) -> None:
    """Reject a template that is not the model's, unless requests' templates are trusted."""
    names = config.model.chat_templates
    if template is None or template in names or config.frontend.trust_request_chat_template:
        return
    what = f"one of the model's templates ({', '.join(names)})" if names else "left out: the model has none"
    raise parse.invalid(
        f"chat_template is {shown(template)}; it must be {what}. Templates from requests are disabled "
        "(--trust-request-chat-template enables them).",
        "chat_template",
    )


def _read_messages(sent: list[Any]) -> tuple[list[ChatMessage], bytes]:
    """Check a conversation's messages; return them, and their encoding for the tokenizer. Raises `RequestError`."""
    try:
        messages, encoded = check_messages(sent), encode_messages(sent)
    except msgspec.ValidationError as error:
        raise parse.explain(error, sent, "messages") from None
    except RecursionError:
        raise parse.invalid("messages is nested too deeply; flatten it.", "messages") from None
    if not messages:
        raise parse.invalid("messages is []; it must hold at least one message.", "messages")
    return messages, encoded


def _template_kwargs(body: ChatBody | TokenizeBody, defaults: Mapping[str, object]) -> bytes:
    """Return the chat template arguments as JSON object; empty if there are none. ``defaults`` fill absent ones."""
    kwargs: dict[str, msgspec.Raw] = {}
    if parse.json_of(body.chat_template_kwargs):
        kwargs = parse.decode_part(body.chat_template_kwargs, _mapping_decoder, "chat_template_kwargs")
    if isinstance(body, ChatBody):
        if body.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", msgspec.Raw(encode_json(body.reasoning_effort)))
        if parse.json_of(body.documents):
            parse.decode_part(body.documents, _any_decoder, "documents")
            kwargs.setdefault("documents", msgspec.Raw(parse.json_of(body.documents)))
    for name, value in defaults.items():
        kwargs.setdefault(name, msgspec.Raw(encode_json(value)))
    return encode_json(kwargs) if kwargs else b""


def check_chat(body: ChatBody, config: EngineConfig) -> None:
    """Reject fields that contradict each other or the server's configuration."""
    parse.check_combinations(body, config)
    if body.reasoning_effort is not None and body.reasoning_effort not in REASONING_EFFORTS:
        allowed = ", ".join(REASONING_EFFORTS)
        raise parse.invalid(
            f"reasoning_effort is {shown(body.reasoning_effort)}; it must be one of {allowed}.",
            "reasoning_effort",
        )
    check_tool_choice(body)
    parse.check_logprob_token_ids(body, has_logprobs=bool(body.logprobs))
    if body.top_logprobs and not body.logprobs:
        raise parse.invalid(
            f"top_logprobs is {body.top_logprobs} but logprobs is not true; set logprobs to true.",
            "top_logprobs",
        )


def reject_unsupported(body: ChatBody) -> None:
    """Reject unsupported fields."""
    for name, raw in (("functions", body.functions), ("function_call", body.function_call)):
        if parse.json_of(raw) not in {b"", b"[]", b'"none"'}:
            raise parse.not_implemented(
                name,
                "the older form of tools",
                "Send `tools`, which the model's template shows to the model.",
            )
    for name, raw in (
        ("media_io_kwargs", body.media_io_kwargs),
        ("mm_processor_kwargs", body.mm_processor_kwargs),
        ("mm_payload", body.mm_payload),
    ):
        if parse.json_of(raw) not in {b"", b"{}"}:
            raise parse.not_implemented(name, "input other than text", "Leave it out.")
    parse.reject_unsupported(body)


def chat_shape(role: str, prefix: str, channels: Channels | None = None) -> ChunkFormat:
    """Return the chunk format; the first events have the role and the echoed text."""

    def by_channel(answer_channels: Channels, index: int, delta: OutputDelta) -> bytes:
        found = answer_channels.split(index, delta.text, delta.spans).delta()
        return b'"delta":' + encode_json(found) if found else b""

    def on_start(writer: ChunkWriter, index: int, started: Started) -> list[bytes]:
        first = b'{"index":%d,"delta":{"role":' + encode_json(role).replace(b"%", b"%%")
        # No token_ids here: clients concatenate id lists.
        first += b',"content":""},"logprobs":null,"finish_reason":null}'
        with_ids = writer.options.return_token_ids
        ids = encode_json(list(unpack_i32(started.prompt_ids)) if with_ids else None)
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
    with_ids = options.return_token_ids and started is not None
    answer["prompt_token_ids"] = (
        list(unpack_i32(started.prompt_ids)) if started is not None and with_ids else None
    )
    return answer


def message_of(index: int, text: str, spans: Sequence[Span], how: ChatAnswer) -> dict[str, object]:
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
