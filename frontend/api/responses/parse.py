"""Translates bodies of the Responses API to a `ChatBody`.

Unsupported features are rejected here, under their names in this API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quintet.frontend.api.chat_messages import given
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.openai.offered_tools import (
    SERVER_TOOLS,
    OfferedTool,
    Translation,
    offered_tools,
    sent_tools,
)
from quintet.frontend.api.openai.tools import TOOL_CHOICES, forced_choice
from quintet.frontend.api.openai.types import ChatBody, ResponseFormat, SamplingFields
from quintet.frontend.api.responses.items import found_tools, leading_tools, messages_of
from quintet.frontend.api.responses.output import CallForm
from quintet.frontend.api.responses.types import (
    InputItem,
    NamedConversation,
    NamedTool,
    ReasoningOptions,
    ResponsesBody,
    TextFormat,
    TextOptions,
)
from quintet.wire.errors import invalid
from quintet.wire.params import SamplingParams, shown

LOGPROBS, REASONING_STATE = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDABLE = (
    LOGPROBS,
    REASONING_STATE,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Allowed values of ``include``. Those for features that this server lacks are accepted and have no effect."""
MAX_TOP_LOGPROBS = 20
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
MAX_LABEL_CHARS = 512
"""Limit of each field that only labels the requester."""
CLIENT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
    "truncate_prompt_tokens": "truncation",
}
"""Field names of this API, by chat field name."""
SHARED_FIELDS = (
    "model",
    "stream",
    *(name for name in SamplingFields.__struct_fields__ if name != "response_format"),
    "parallel_tool_calls",
    "include_reasoning",
    "cache_salt",
    "priority",
    "timeout",
    "chat_template_kwargs",
    "user",
    "service_tier",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
)
"""Fields with the same name and type in the chat API."""
NO_FIELDS = {"description": None, "parameters": None, "strict": None}
"""Defaults of a function tool in a response."""
LABELS = ("user", "safety_identifier", "prompt_cache_key", "service_tier")

_items_decoder: msgspec.json.Decoder[str | list[InputItem]] = msgspec.json.Decoder(str | list[InputItem])
_conversation_decoder: msgspec.json.Decoder[str | NamedConversation] = msgspec.json.Decoder(
    str | NamedConversation
)
_mapping = msgspec.json.Decoder(dict[str, msgspec.Raw])
_reasoning_decoder = msgspec.json.Decoder(ReasoningOptions)
_text_decoder = msgspec.json.Decoder(TextOptions)


def items_of(body: ResponsesBody) -> list[InputItem]:
    """Return the items of the request's input; text is one user message. It may be empty if it continues other messages."""
    continues = bool(
        body.instructions or body.previous_response_id is not None or parse.json_of(body.conversation)
    )
    if continues and not parse.json_of(body.input):
        return []
    given = parse.decode_part(body.input, _items_decoder, "input")
    if isinstance(given, str):
        return [InputItem(type="message", role="user", content=given)]
    if not given and not continues:
        raise invalid("input is []; it must be a text, or hold at least one item.", "input")
    return given


def chat_body(
    body: ResponsesBody, items: Sequence[InputItem]
) -> tuple[ChatBody, Translation, dict[str, CallForm]]:
    """Translate a request, with ``items`` as its conversation, to a chat body. Raises `RequestError`.

    The third result is the format of calls that are no plain function calls, by function name.
    """
    _reject_unsupported(body)
    _check_values(body)
    if isinstance(body.tool_choice, NamedTool):
        body.tool_choice = TOOL_CHOICES.get(body.tool_choice.type, body.tool_choice)
    messages, places = messages_of(body.instructions, items)
    chat = ChatBody(messages=messages)
    for name in SHARED_FIELDS:
        setattr(chat, name, getattr(body, name))
    chat.max_completion_tokens = body.max_output_tokens
    if body.truncation == "auto":
        chat.truncate_prompt_tokens = -1
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs or 0
    chat.reasoning_effort, text_format = _settings(body, items)
    chat.response_format = _format(text_format)
    tools = offered_tools(sent_tools(body.tools, "tools")) + leading_tools(items)
    deferred = [tool for tool in tools if tool.is_deferred] + found_tools(items)
    forms = _call_forms([*tools, *deferred])
    tools = [tool for tool in tools if not tool.is_deferred]
    if isinstance(body.tool_choice, NamedTool) and not (tools or parse.json_of(body.tools)):
        chat.tool_choice = "required"  # rejected below, as any choice without tools
    elif isinstance(body.tool_choice, NamedTool):
        tools, chat.tool_choice = _choice(body.tool_choice, tools)
    else:
        chat.tool_choice = body.tool_choice
    if tools:
        chat.tools = msgspec.Raw(encode_json([tool.nested() for tool in tools]))
    elif chat.tool_choice == "auto" or parse.json_of(body.tools):  # no tool is offered
        chat.tool_choice = None
    return chat, Translation(places, deferred), forms


def _settings(body: ResponsesBody, items: Sequence[InputItem]) -> tuple[str | None, TextFormat | None]:
    """Return effort and text format: the request's, or those of the last item that updates them."""
    reasoning, text = body.reasoning or ReasoningOptions(), body.text or TextOptions()
    for index, item in enumerate(items):
        if item.type == "configuration_update" and parse.json_of(item.reasoning):
            reasoning = parse.decode_part(item.reasoning, _reasoning_decoder, f"input[{index}].reasoning")
        if item.type == "configuration_update" and parse.json_of(item.text):
            text = parse.decode_part(item.text, _text_decoder, f"input[{index}].text")
    return reasoning.effort, text.format


def _call_forms(tools: Sequence[OfferedTool]) -> dict[str, CallForm]:
    return {
        tool.name: CallForm(tool.kind, tool.own_name, tool.namespace)
        for tool in tools
        if tool.kind != "function" or tool.namespace
    }


def _choice(
    choice: NamedTool, tools: Sequence[OfferedTool]
) -> tuple[list[OfferedTool], str | dict[str, msgspec.Raw] | None]:
    """Return the offered tools, and the choice among them."""
    if choice.type in ("function", "custom"):
        if choice.name is None and choice.function is not None:
            choice.name = choice.function.name
        name = given(choice.name, "tool_choice.name")
        named = next((tool.name for tool in tools if _is_named(tool, choice)), name)
        return list(tools), forced_choice(named)
    if choice.type != "allowed_tools":
        of_type = [tool.name for tool in tools if tool.kind == choice.type]
        if not of_type and not choice.type.startswith(SERVER_TOOLS):
            raise parse.not_implemented(
                f"tool_choice.type, {shown(choice.type)},",
                "tools of that type",
                "Send type function, custom or allowed_tools.",
            )
        return list(tools), forced_choice(of_type[0]) if of_type else None
    if choice.mode not in ("auto", "required"):
        raise invalid(
            f"tool_choice.mode is {shown(choice.mode)}; it must be 'auto' or 'required'.", "tool_choice"
        )
    wanted = [each for each in choice.tools or () if each.type in ("function", "custom")]
    missing = [each for each in wanted if not any(_is_named(tool, each) for tool in tools)]
    if missing or not choice.tools:
        sent = shown(str(missing[0].name)) if missing else "none"
        raise invalid(
            f"tool_choice.tools names {sent}; it must name at least one tool of the request, and no others.",
            "tool_choice",
        )
    kinds = {each.type for each in choice.tools} - {"function", "custom"}
    allowed = [tool for tool in tools if tool.kind in kinds or any(_is_named(tool, each) for each in wanted)]
    return allowed, choice.mode if allowed else None


def _is_named(tool: OfferedTool, choice: NamedTool) -> bool:
    return choice.name in (tool.own_name, tool.name) and choice.namespace in (None, tool.namespace)


def _format(sent_format: TextFormat | None) -> ResponseFormat | None:
    if sent_format is None or sent_format.type == "text":
        return None
    if sent_format.type == "json_object":
        return ResponseFormat(type=sent_format.type, schema=sent_format.schema)
    if sent_format.type != "json_schema":
        raise invalid(
            f"text.format.type is {shown(sent_format.type)}; it must be one of text, json_object, json_schema.",
            "text.format",
        )
    if sent_format.json_schema is not None and not parse.json_of(sent_format.schema):
        nested, sent_format.json_schema = sent_format.json_schema, None
        for name in nested.__struct_fields__:
            if getattr(nested, name) not in (None, msgspec.UNSET):
                setattr(sent_format, name, getattr(nested, name))
    schema = parse.decode_part(sent_format.schema, _mapping, "text.format.schema")
    named = {"name": sent_format.name or "output", "schema": schema, "strict": sent_format.strict}
    return ResponseFormat(type=sent_format.type, json_schema=msgspec.Raw(encode_json(named)))


def _check_values(body: ResponsesBody) -> None:
    for name, value, allowed in (
        ("truncation", body.truncation, ("auto", "disabled")),
        ("text.verbosity", None if body.text is None else body.text.verbosity, ("low", "medium", "high")),
    ):
        if value is not None and value not in allowed:
            raise invalid(f"{name} is {shown(value)}; it must be one of {', '.join(allowed)}.", name)
    for included in body.include or ():
        if included not in INCLUDABLE:
            raise invalid(f"include has {shown(included)}; it may have {', '.join(INCLUDABLE)}.", "include")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
        raise invalid(
            f"top_logprobs is {shown(body.top_logprobs)}; it must be 0 to {MAX_TOP_LOGPROBS}.", "top_logprobs"
        )
    check_metadata(body.metadata or {})
    for name in LABELS:
        label = getattr(body, name)
        if label is not None and len(label) > MAX_LABEL_CHARS:
            raise invalid(
                f"{name} has {len(label)} characters; it must have at most {MAX_LABEL_CHARS}.", name
            )


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise `RequestError` if metadata exceeds OpenAI's limits."""
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS for key, value in metadata.items()
    ):
        raise invalid(
            f"metadata is too large; at most {MAX_METADATA} pairs are allowed, with keys of up to {MAX_KEY_CHARS} and values of "
            f"up to {MAX_VALUE_CHARS} characters.",
            "metadata",
        )


def conversation_of(body: ResponsesBody) -> str:
    """Return the id of the conversation that the response belongs to, or ""."""
    if not parse.json_of(body.conversation):
        return ""
    if body.previous_response_id is not None:
        raise invalid(
            "conversation and previous_response_id were both sent; send one of them.", "conversation"
        )
    given = parse.decode_part(body.conversation, _conversation_decoder, "conversation")
    return given if isinstance(given, str) else given.id


def _reject_unsupported(body: ResponsesBody) -> None:
    if body.response_format is not None and body.response_format.type != "text":
        raise invalid(
            "response_format is a field of chat completions; send text.format instead.", "response_format"
        )
    for name, what, advice in (
        ("prompt", "stored prompts", "Send instructions and input."),
        ("moderation", "moderation", "Leave it out."),
        ("previous_input_messages", "messages in this format", "Send them as input."),
    ):
        if parse.json_of(getattr(body, name)) not in {b"", b"[]", b"{}"}:
            raise parse.not_implemented(name, what, advice)


def echo_of(body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    """Return the request fields that the response repeats, with the values in effect."""
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    form = text.format or TextFormat(type="text")
    encoded = parse.json_of(body.tools)
    tools: list[dict[str, Any]] = msgspec.json.decode(encoded) if encoded else []
    return {
        "frequency_penalty": params.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": _sent(form), "verbosity": text.verbosity or "medium"},
        "tool_choice": _chosen(body.tool_choice),
        "tools": [{**(NO_FIELDS if tool.get("type") == "function" else {}), **tool} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _sent(part: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct that were sent."""
    values = msgspec.structs.asdict(part)
    return {name: value for name, value in values.items() if value is not None and value is not msgspec.UNSET}


def _chosen(choice: str | NamedTool | None) -> str | dict[str, Any]:
    if not isinstance(choice, NamedTool):
        return choice or "auto"
    chosen = _sent(choice)
    if choice.tools is not None:
        chosen["tools"] = [_sent(tool) for tool in choice.tools]
    return chosen
