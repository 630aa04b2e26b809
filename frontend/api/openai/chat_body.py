"""Body of a chat request: checks, the prompt, sampling parameters and output parsing. For all APIs with chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.openai.anthropic_blocks import with_plain_calls
from quintet.frontend.api.openai.json_errors import explain
from quintet.frontend.api.openai.offered_tools import AS_SENT, Translation, shown_tools, with_deferred
from quintet.frontend.api.openai.prompts import token_prompt
from quintet.frontend.api.openai.reasoning_switch import last_mark, read_reasoning
from quintet.frontend.api.openai.tools import check_tool_choice, form_of_calls, form_or_calls
from quintet.frontend.api.openai.types import ChatBody, TokenizeBody
from quintet.wire.chat import ChatMessage, check_messages, encode_messages
from quintet.wire.config import EngineConfig, ParsersConfig
from quintet.wire.errors import invalid
from quintet.wire.messages import ChatPrompt, TokenPrompt
from quintet.wire.params import SamplingParams, shown
from quintet.wire.request import MAX_SCHEMAS_BYTES, OutputParsing
from quintet.wire.structured import StructuredOutputsParams

_mapping_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any_decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(object)

THINKING_KWARGS = ("enable_thinking", "thinking")
"""Chat template arguments that turn reasoning on and off; templates read one of them."""

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


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


def checked_chat(
    body: ChatBody, config: EngineConfig, translation: Translation = AS_SENT
) -> tuple[Conversation, SamplingParams, OutputParsing | None]:
    """Validate the body except unsupported fields; return prompt, parameters and output parsing."""
    check_chat(body, config)
    conversation = parse_conversation(body, config, translation)
    params, parsing = params_and_parsing(body, conversation.tools, config)
    if parsing is not None and conversation.prompt.continue_final_message:
        parsing.prompt_end = last_mark(conversation.last_text, config.model.parsers.thinks)
    return conversation, params, parsing


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
    messages, encoded, places = _read_messages(body.messages or [])
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generates:
        raise invalid(
            "add_generation_prompt and continue_final_message are both true; set one of them to false.",
            "continue_final_message",
        )
    tools = shown_tools(body.tools) if parse.json_of(body.tools) else b""
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
            message_names=list(translation.message_names) or places,
        ),
        role,
        messages[-1].text if messages[-1].role == role else "",
        sum(len(message.tool_calls or ()) for message in messages),
        with_deferred(tools, translation.deferred) if translation.deferred else tools,
    )


def _check_template(template: str | None, config: EngineConfig) -> None:
    """Reject a template that is not the model's, unless requests' templates are trusted."""
    names = config.model.chat_templates
    if template is None or template in names or config.frontend.trust_request_chat_template:
        return
    what = f"one of the model's templates ({', '.join(names)})" if names else "left out: the model has none"
    raise invalid(
        f"chat_template is {shown(template)}; it must be {what}. Templates from requests are disabled "
        "(--trust-request-chat-template enables them).",
        "chat_template",
    )


def _read_messages(sent: list[Any]) -> tuple[list[ChatMessage], bytes, list[str]]:
    """Check messages; return them, their encoding for the tokenizer, and their places if those differ. Raises `RequestError`."""
    places: list[str] = []
    try:
        messages, encoded = check_messages(sent), encode_messages(sent)
        if b"tool_use" in encoded or b"tool_result" in encoded:
            sent, places = with_plain_calls(sent)
            messages, encoded = check_messages(sent), encode_messages(sent)
    except msgspec.ValidationError as error:
        raise explain(error, sent, "messages") from None
    except RecursionError:
        raise invalid("messages is nested too deeply; flatten it.", "messages") from None
    if not messages:
        raise invalid("messages is []; it must hold at least one message.", "messages")
    return messages, encoded, places


def _template_kwargs(body: ChatBody | TokenizeBody, defaults: Mapping[str, object]) -> bytes:
    """Return the chat template arguments as JSON object; empty if there are none. ``defaults`` fill absent ones."""
    kwargs: dict[str, msgspec.Raw] = {}
    if parse.json_of(body.chat_template_kwargs):
        kwargs = parse.decode_part(body.chat_template_kwargs, _mapping_decoder, "chat_template_kwargs")
    if isinstance(body, ChatBody):
        if body.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", msgspec.Raw(encode_json(body.reasoning_effort)))
            if body.enable_thinking is None:
                body.enable_thinking = body.reasoning_effort != "none"
        if body.enable_thinking is not None and kwargs.keys().isdisjoint(THINKING_KWARGS):
            kwargs |= dict.fromkeys(THINKING_KWARGS, msgspec.Raw(encode_json(body.enable_thinking)))
        if parse.json_of(body.documents):
            parse.decode_part(body.documents, _any_decoder, "documents")
            kwargs.setdefault("documents", msgspec.Raw(parse.json_of(body.documents)))
    has_switch = not kwargs.keys().isdisjoint(THINKING_KWARGS)
    for name, value in defaults.items():
        if not (has_switch and name in THINKING_KWARGS):
            kwargs.setdefault(name, msgspec.Raw(encode_json(value)))
    return encode_json(kwargs) if kwargs else b""


def check_chat(body: ChatBody, config: EngineConfig) -> None:
    """Reject fields that contradict each other or the server's configuration."""
    parse.check_combinations(body, config)
    if body.reasoning is not None or body.thinking is not None:
        read_reasoning(body)
    if body.reasoning_effort is not None and body.reasoning_effort not in REASONING_EFFORTS:
        allowed = ", ".join(REASONING_EFFORTS)
        raise invalid(
            f"reasoning_effort is {shown(body.reasoning_effort)}; it must be one of {allowed}.",
            "reasoning_effort",
        )
    if body.tool_choice is not None:
        check_tool_choice(body)
    parse.check_logprob_token_ids(body, has_logprobs=bool(body.logprobs))
    if body.top_logprobs and not body.logprobs:
        raise invalid(
            f"top_logprobs is {body.top_logprobs} but logprobs is not true; set logprobs to true.",
            "top_logprobs",
        )


def reject_unsupported(body: ChatBody) -> None:
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


def params_and_parsing(
    body: ChatBody, tools: bytes, config: EngineConfig
) -> tuple[SamplingParams, OutputParsing | None]:
    """Return the sampling parameters and the output parsing of a checked body.

    tools: the functions that the model may call, as JSON. They replace ``body.tools``.
    """
    body.tools = msgspec.Raw(tools) if tools else msgspec.UNSET
    params = _chat_params(body, tools, config)
    return params, reading_of(body, tools, config.model.parsers, params.structured_outputs)


def _chat_params(body: ChatBody, tools: bytes, config: EngineConfig) -> SamplingParams:
    """Return the checked sampling parameters of a request. Its tools were checked before."""
    model = config.model
    max_tokens = parse.chat_max_tokens(body)
    if max_tokens is None and "max_tokens" in model.generation_defaults:
        max_tokens = int(model.generation_defaults["max_tokens"])
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = parse.sampling_params(body, model, max_tokens=max_tokens, logprobs=logprobs)
    form = None if body.tool_choice is None else form_of_calls(body, model.parsers.forced)
    is_format = body.response_format is not None and body.response_format.type != "text"
    if form is not None and params.structured_outputs is not None and not is_format:
        raise invalid(
            "tool_choice requires calls, but the request also asks for another output format; send one of them.",
            "tool_choice",
        )
    if form is not None:
        params.structured_outputs = form
    elif params.structured_outputs is not None and tools:
        params.structured_outputs = form_or_calls(params.structured_outputs, body, model.parsers)
    names = {"logprobs": "top_logprobs", **parse.names_of(body)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return parse.checked(params, config.frontend.max_logprobs, model, names)


def reading_of(
    body: ChatBody, tools: bytes, parsers: ParsersConfig, form: StructuredOutputsParams | None = None
) -> OutputParsing | None:
    """Return the parsing of the output. Calls are parsed only if the model sees ``tools`` and may call them.

    ``form``: constraint of the output. Optional calls in it have the format of required ones.
    """
    tools = tools if body.tool_choice != "none" else b""
    if tools and body.tool_choice not in (None, "auto"):
        return OutputParsing(parsers.reasoning, parsers.forced.reader, requires_calls=True)
    if tools and form is not None and form.calls:
        return OutputParsing(parsers.reasoning, parsers.forced.reader)
    name = parsers.tools if tools else ""
    if not (parsers.reasoning or name):
        return None
    schemas = tools if name and parsers.needs_schemas else b""
    if len(schemas) > MAX_SCHEMAS_BYTES:
        raise invalid(
            f"tools has {len(schemas)} bytes; the limit is {MAX_SCHEMAS_BYTES} for a model without argument types in its call "
            "format. Send fewer tools, or shorter descriptions.",
            "tools",
        )
    return OutputParsing(parsers.reasoning, name, schemas)
