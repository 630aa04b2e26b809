"""Translates bodies of the Anthropic API to a `ChatBody`.

Chat templates expect OpenAI's messages: a turn of content blocks becomes one message, or several with tool results.
Unsupported features are rejected here, under their Anthropic names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from quintet.frontend.api.anthropic.types import (
    Block,
    ConversationBody,
    MessagesBody,
    ToolChoice,
    Turn,
)
from quintet.frontend.api.merged_messages import MergedMessages
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.openai.chat_body import THINKING_KWARGS
from quintet.frontend.api.openai.offered_tools import OfferedTool, SentTool, Translation, offered_tools
from quintet.frontend.api.openai.types import FORM_FIELDS, ChatBody, RawField, ResponseFormat
from quintet.wire.message_text import omitted_media, without_billing_header
from quintet.wire.params import shown

ROLES = ("user", "assistant", "system", "developer")
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
CLIENT_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Anthropic field names, by chat field name."""

SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "_tool_result", "container_upload", "fallback")
"""Suffixes of block types that tools of Anthropic's servers write."""

Message = dict[str, Any]
FieldT = TypeVar("FieldT")
_any_decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(object)
_mapping = msgspec.json.Decoder(dict[str, msgspec.Raw])
_log = logging.getLogger("quintet")


class _TextSource(msgspec.Struct, kw_only=True):
    type: str
    data: str | None = None
    content: str | list[Block] | None = None


class _OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: RawField = msgspec.UNSET


_source = msgspec.json.Decoder(_TextSource)
_output_format = msgspec.json.Decoder(_OutputFormat)

MAX_DEFINITION_CHARS = 4 << 20
"""Characters of the definitions at references to deferred tools: a reference is short, and repeats a whole definition."""


@dataclass(slots=True)
class _Reader:
    """State while reading a conversation's turns."""

    tools: Mapping[str, OfferedTool]
    names: dict[str, str] = field(default_factory=dict)
    """Names of called tools, by call id."""
    num_definition_chars: int = 0
    """Characters of the definitions at references to deferred tools."""


def chat_body(body: ConversationBody) -> tuple[ChatBody, Translation]:
    """Translate a request to a chat body. Raises `RequestError`."""
    _reject_unsupported(body)
    tools = _tools(body.tools or ())
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
    if body.tool_choice is not None and (shown_tools or not body.tools):
        chat.tool_choice = choice
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    for name in FORM_FIELDS:
        setattr(chat, name, getattr(body, name))
    chat.response_format = _format(body.output_format, "output_format")
    if body.output_config is not None:
        chat.reasoning_effort = body.output_config.effort
        form = _format(body.output_config.format, "output_config.format")
        chat.response_format = form or chat.response_format
    if isinstance(body, MessagesBody):
        chat.max_tokens, chat.stop, chat.stream = body.max_tokens, body.stop_sequences, body.stream
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.seed = body.seed
        chat.cache_salt, chat.priority, chat.timeout = body.cache_salt, body.priority, body.timeout
    return chat, Translation(places, [tool for tool in tools if tool.is_deferred])


def messages_of(
    system: str | Sequence[Block] | None, turns: Sequence[Turn], tools: Sequence[OfferedTool] = ()
) -> tuple[list[Message], list[str]]:
    """Return a conversation as chat messages, and each one's place in the body.

    Adjacent messages of one role are merged, except system messages, which templates treat differently.
    """
    if not turns:
        raise parse.invalid("messages is []; it must hold at least one message.", "messages")
    reader = _Reader({tool.name: tool for tool in tools})
    found = MergedMessages()
    text = without_billing_header(_text(system, "system", reader)) if system else ""
    if text:
        found.add({"role": "system", "content": text}, "system")
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if turn.role not in ROLES:
            raise parse.invalid(
                f"{where}.role is {shown(turn.role)}; it must be one of {', '.join(ROLES)}.", "messages"
            )
        for message in _messages_of(turn, where, reader):
            found.add(message, where)
    messages = found.merged()
    last = messages[-1]
    if last["role"] == "assistant" and ("tool_calls" in last or not last["content"]):
        raise parse.invalid(
            "messages ends with an assistant message without text; append the result of each tool_use as a "
            "tool_result block of a user message.",
            "messages",
        )
    return messages, found.places


def _messages_of(turn: Turn, where: str, reader: _Reader) -> list[Message]:
    """Return the chat messages of one turn."""
    content: str | list[Block] = ""
    if turn.role != "assistant":
        _given(turn.content, f"{where}.content")
    if turn.content is not None:
        content = turn.content
    if isinstance(content, str):
        return [{"role": turn.role, "content": content}]
    if turn.role == "assistant":
        return [_assistant(content, f"{where}.content", reader)]
    found: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            found.append({"role": turn.role, "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        if block.type == "tool_result" and turn.role == "user":
            flush()
            call = _given(block.tool_use_id, f"{at}.tool_use_id")
            result = {
                "role": "tool",
                "tool_call_id": call,
                "content": _text(block.content or "", f"{at}.content", reader, is_result=True),
            }
            found.append(result | ({"name": reader.names[call]} if call in reader.names else {}))
        else:
            texts += _text_of(block, at, reader)
    flush()
    return found or [{"role": turn.role, "content": ""}]


def _assistant(blocks: Sequence[Block], where: str, reader: _Reader) -> Message:
    """Return one message with text, reasoning and calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(_given(block.thinking, f"{at}.thinking"))
            case "redacted_thinking":
                pass  # encrypted for Anthropic's models
            case "tool_use":
                call = _given(block.id, f"{at}.id")
                name = reader.names[call] = _given(block.name, f"{at}.name")
                sent = parse.json_of(block.input)
                arguments = parse.decode_part(block.input, _any_decoder, f"{at}.input") if sent else {}
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call, "type": "function", "function": function})
            case _:
                texts += _text_of(block, at, reader, is_answer=True)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(
    content: str | Sequence[Block] | Block, where: str, reader: _Reader, *, is_result: bool = False
) -> str:
    if isinstance(content, str):
        return content
    blocks = [content] if isinstance(content, Block) else content
    return "\n".join(
        text
        for i, block in enumerate(blocks)
        for text in _text_of(block, f"{where}[{i}]", reader, is_result=is_result)
    )


def _text_of(
    block: Block, where: str, reader: _Reader, *, is_answer: bool = False, is_result: bool = False
) -> list[str]:
    """Return a block's texts; empty for blocks of server tools, and for unknown ones of an answer.

    In tool results, text replaces images and files, which agents read with their tools.

    Raises `RequestError` for unsupported blocks.
    """
    match block.type:
        case "text":
            return [_given(block.text, f"{where}.text")]
        case "document":
            return [_document(block, where, reader, is_result=is_result)]
        case "search_result":
            source = parse.json_of(block.source).decode().strip('"')
            found = _text(block.content or "", f"{where}.content", reader)
            return ["\n".join(filter(None, (block.title, source, found)))]
        case "tool_reference":
            return [_reference(_given(block.tool_name or block.name, f"{where}.tool_name"), reader)]
        case "tool_addition" | "tool_removal":
            tool = _given(block.tool, f"{where}.tool")
            name = _given(tool.name or tool.tool_name, f"{where}.tool.name")
            return [_reference(name, reader) if block.type == "tool_addition" else f"Tool removed: {name}"]
        case "compaction":
            return [_text(block.content or "", f"{where}.content", reader)]
        case "image" if not is_result:
            raise parse.not_implemented(f"{where}: a block of type image", "image input", "Send text.")
    if block.type.endswith(SERVER_BLOCKS) or is_answer:
        _log.info("%s, a block of type %s, was skipped: it is of another server's tool", where, block.type)
        return []
    if is_result and (omitted := omitted_media(block.type, where)):
        return [omitted]
    raise parse.not_implemented(
        f"{where}: a block of type {shown(block.type)}",
        "content blocks of that type",
        "Send text; in assistant messages also thinking and tool_use, in user messages also tool_result.",
    )


def _reference(name: str, reader: _Reader) -> str:
    """Return the text that announces a tool: its definition, if the template does not show it."""
    tool = reader.tools.get(name)
    if tool is None or not tool.is_deferred:
        return f"Tool available: {name}"
    definition = tool.definition()
    reader.num_definition_chars += len(definition)
    if reader.num_definition_chars > MAX_DEFINITION_CHARS:
        raise parse.invalid(
            f"messages refers to deferred tools with definitions of more than {MAX_DEFINITION_CHARS} characters in total; "
            "refer to each tool once.",
            "messages",
        )
    return f"Tool available: {definition}"


def _document(block: Block, where: str, reader: _Reader, *, is_result: bool) -> str:
    """Return a document of text or of blocks, with its title."""
    source = parse.decode_part(block.source, _source, f"{where}.source")
    if source.type == "content" and source.content is not None:
        text = _text(source.content, f"{where}.source.content", reader, is_result=is_result)
        return f"{block.title}\n{text}" if block.title else text
    if source.type != "text" or source.data is None:
        if is_result and (omitted := omitted_media(block.type, where)):
            return omitted
        raise parse.not_implemented(
            f"{where}: a document with a source of type {shown(source.type)}",
            "file input",
            "Send its text: a source of type text, with media_type text/plain.",
        )
    return f"{block.title}\n{source.data}" if block.title else source.data


def _given(value: FieldT | None, name: str) -> FieldT:
    if value is None:
        raise parse.invalid(f"{name} is missing; it is required.", "messages")
    return value


def _tools(sent: Sequence[SentTool]) -> list[OfferedTool]:
    for index, tool in enumerate(sent):
        has_schema = parse.json_of(tool.input_schema) or parse.json_of(tool.parameters) or tool.function
        if tool.type in (None, "custom") and not has_schema and not tool.defer_loading:
            name = f"tools[{index}].input_schema"
            raise parse.invalid(f"{name} is missing; it is required.", name)
    return offered_tools(sent)


def _choice(choice: ToolChoice) -> str | dict[str, msgspec.Raw]:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            name = _given(choice.name, "tool_choice.name")
            return {"type": msgspec.Raw(b'"function"'), "function": msgspec.Raw(encode_json({"name": name}))}
        case _:
            raise parse.invalid(
                f"tool_choice.type is {shown(choice.type)}; it must be 'auto', 'any', 'tool' or 'none'.",
                "tool_choice",
            )


def _format(raw: RawField, name: str) -> ResponseFormat | None:
    """Translate the output format."""
    if not parse.json_of(raw):
        return None
    sent_format = parse.decode_part(raw, _output_format, name)
    if sent_format.type != "json_schema":
        raise parse.invalid(f"{name}.type is {shown(sent_format.type)}; it must be 'json_schema'.", name)
    schema: dict[str, msgspec.Raw] = parse.decode_part(sent_format.schema, _mapping, f"{name}.schema")
    named = {"name": "output", "schema": schema, "strict": True}
    return ResponseFormat(type=sent_format.type, json_schema=msgspec.Raw(encode_json(named)))


def _template_kwargs(body: ConversationBody) -> msgspec.Raw:
    """Return the chat template arguments: the request's own, and the reasoning switch."""
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        if body.thinking.type not in THINKING:
            raise parse.invalid(
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
        raise parse.invalid(
            "response_format is a field of chat completions; send output_config.format instead.",
            "response_format",
        )
    if parse.json_of(body.thread):  # the client's next request would contain only the last turn
        raise parse.invalid(
            "thread is not supported, because this server stores no threads; send the whole conversation without "
            "thread.",
            "thread",
        )
    for name, raw in (("mcp_servers", body.mcp_servers), ("container", body.container)):
        if parse.json_of(raw) not in {b"", b"[]"}:
            raise parse.not_implemented(name, "server-side tools", "Run the tools, and send their results.")
