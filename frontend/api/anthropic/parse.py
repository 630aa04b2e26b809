"""Translates bodies of the Anthropic API to a `ChatBody`.

Chat templates expect OpenAI's messages: a turn of content blocks becomes one message, or several with tool results.
Unsupported features are rejected here, under their Anthropic names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quintet.frontend.api.anthropic.turns import messages_of
from quintet.frontend.api.anthropic.types import ConversationBody, MessagesBody, ToolChoice, Turn
from quintet.frontend.api.chat_messages import given
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.openai.chat_body import THINKING_KWARGS
from quintet.frontend.api.openai.offered_tools import OfferedTool, SentTool, Translation, offered_tools
from quintet.frontend.api.openai.tools import forced_choice
from quintet.frontend.api.openai.types import FORM_FIELDS, ChatBody, RawField, ResponseFormat
from quintet.wire.errors import invalid
from quintet.wire.params import shown

THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
CLIENT_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Anthropic field names, by chat field name."""

_mapping = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: RawField = msgspec.UNSET


_output_format = msgspec.json.Decoder(_OutputFormat)


def chat_body(body: ConversationBody) -> tuple[ChatBody, Translation]:
    """Translate a request to a chat body. Raises `RequestError`."""
    _reject_unsupported(body)
    tools = _tools(body.tools or ()) + _inline_tools(body.messages)
    shown_tools = [tool for tool in tools if not tool.is_deferred]
    messages, places = messages_of(body.system, body.messages, tools)
    chat = ChatBody(
        messages=messages,
        model=body.model,
        chat_template_kwargs=_template_kwargs(body),
    )
    if messages[-1]["role"] == "assistant":  # assistant prefill: the response continues it
        chat.continue_final_message = True
    choice = None if body.tool_choice is None else _choice(body.tool_choice)
    if shown_tools:
        chat.tools = msgspec.Raw(encode_json([tool.nested() for tool in shown_tools]))
    if body.tool_choice is not None and (shown_tools or not (body.tools or choice in ("auto", "none"))):
        chat.tool_choice = choice
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    for name in FORM_FIELDS:
        setattr(chat, name, getattr(body, name))
    chat.response_format = _format(body.output_format, "output_format")
    configs = [body.output_config, *(turn.output_config for turn in body.messages)]
    efforts = [config.effort for config in configs if config is not None and config.effort is not None]
    chat.reasoning_effort = efforts[-1] if efforts else None
    if body.output_config is not None:
        form = _format(body.output_config.format, "output_config.format")
        chat.response_format = form or chat.response_format
    if isinstance(body, MessagesBody):
        chat.max_tokens = body.max_tokens or 1  # the token of a request for 0 is not returned
        chat.stop, chat.stream = body.stop_sequences, body.stream
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.seed = body.seed
        chat.cache_salt, chat.priority, chat.timeout = body.cache_salt, body.priority, body.timeout
    return chat, Translation(places, [tool for tool in tools if tool.is_deferred])


def _tools(sent: Sequence[SentTool]) -> list[OfferedTool]:
    for index, tool in enumerate(sent):
        has_schema = parse.json_of(tool.input_schema) or parse.json_of(tool.parameters) or tool.function
        if tool.type in (None, "custom") and not has_schema and not tool.defer_loading:
            name = f"tools[{index}].input_schema"
            raise invalid(f"{name} is missing; it is required.", name)
    return offered_tools(sent)


def _inline_tools(turns: Sequence[Turn]) -> list[OfferedTool]:
    """Return the tools that messages define: the template does not show them, the message does."""
    tools = [
        tool
        for index, turn in enumerate(turns)
        if isinstance(turn.content, list)
        for place, block in enumerate(turn.content)
        if block.type == "tool_addition" and block.tool is not None and block.tool.definition is not None
        for tool in offered_tools(
            [block.tool.definition], f"messages[{index}].content[{place}].tool.definition"
        )
    ]
    for tool in tools:
        tool.is_deferred = True
    return tools


def _choice(choice: ToolChoice) -> str | dict[str, msgspec.Raw]:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            return forced_choice(given(choice.name, "tool_choice.name"))
        case _:
            raise invalid(
                f"tool_choice.type is {shown(choice.type)}; it must be 'auto', 'any', 'tool' or 'none'.",
                "tool_choice",
            )


def _format(raw: RawField, name: str) -> ResponseFormat | None:
    if not parse.json_of(raw):
        return None
    sent_format = parse.decode_part(raw, _output_format, name)
    if sent_format.type != "json_schema":
        raise invalid(f"{name}.type is {shown(sent_format.type)}; it must be 'json_schema'.", name)
    schema: dict[str, msgspec.Raw] = parse.decode_part(sent_format.schema, _mapping, f"{name}.schema")
    named = {"name": "output", "schema": schema, "strict": True}
    return ResponseFormat(type=sent_format.type, json_schema=msgspec.Raw(encode_json(named)))


def _template_kwargs(body: ConversationBody) -> msgspec.Raw:
    """Return the chat template arguments: the request's own, and the reasoning switch."""
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        if body.thinking.type not in THINKING:
            raise invalid(
                f"thinking.type is {shown(body.thinking.type)}; it must be one of {', '.join(THINKING)}.",
                "thinking",
            )
        kwargs = dict.fromkeys(THINKING_KWARGS, THINKING[body.thinking.type])
    if parse.json_of(body.chat_template_kwargs):
        own = parse.decode_part(body.chat_template_kwargs, _mapping, "chat_template_kwargs")
        kwargs.update(own)
    return msgspec.Raw(encode_json(kwargs))


def _reject_unsupported(body: ConversationBody) -> None:
    if body.response_format is not None and body.response_format.type != "text":
        raise invalid(
            "response_format is a field of chat completions; send output_config.format instead.",
            "response_format",
        )
    if parse.json_of(body.thread):  # the client's next request would contain only the last turn
        raise invalid(
            "thread is not supported, because this server stores no threads; send the whole conversation without "
            "thread.",
            "thread",
        )
    if isinstance(body, MessagesBody) and parse.json_of(body.compaction):
        raise parse.not_implemented("compaction", "compaction", "Ask for a summary in a message.")
    if isinstance(body, MessagesBody) and body.max_tokens == 0 and body.stream:
        raise invalid(
            "max_tokens is 0, which caches the prompt without an answer, but stream is true; leave stream out.",
            "max_tokens",
        )
    for name, raw in (("mcp_servers", body.mcp_servers), ("container", body.container)):
        if parse.json_of(raw) not in {b"", b"[]"}:
            raise parse.not_implemented(name, "server-side tools", "Run the tools, and send their results.")
