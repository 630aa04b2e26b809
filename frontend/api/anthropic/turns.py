"""Translates turns of content blocks to chat messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from quintet.frontend.api.anthropic.types import ContentBlock, ReferencedTool, Turn
from quintet.frontend.api.chat_messages import Message, call_of, given, merge_messages, result_message
from quintet.frontend.api.openai import parse
from quintet.frontend.api.openai.offered_tools import OfferedTool
from quintet.wire.errors import invalid
from quintet.wire.message_text import omitted_part, without_billing_header
from quintet.wire.params import shown

ROLES = ("user", "assistant", "system", "developer")
SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "_tool_result", "container_upload", "fallback")
"""Suffixes of block types that tools of Anthropic's servers write."""
MAX_DEFINITION_CHARS = 4 << 20
"""Characters of the definitions at references to deferred tools: a reference is short, and repeats a whole definition."""

_any_decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(object)
_log = logging.getLogger("quintet")


class _TextSource(msgspec.Struct, kw_only=True):
    type: str
    data: str | None = None
    content: str | list[ContentBlock] | None = None


_source = msgspec.json.Decoder(_TextSource)


@dataclass(slots=True)
class _Reader:
    """State while reading a conversation's turns."""

    tools: Mapping[str, OfferedTool]
    names: dict[str, str] = field(default_factory=dict)
    """Names of called tools, by call id."""
    num_definition_chars: int = 0
    """Characters of the definitions at references to deferred tools."""


def messages_of(
    system: str | Sequence[ContentBlock] | None, turns: Sequence[Turn], tools: Sequence[OfferedTool] = ()
) -> tuple[list[Message], list[str]]:
    """Return a conversation as chat messages, and each one's place in the body.

    Adjacent messages of one role are merged, except system messages, which templates treat differently.
    """
    if not turns:
        raise invalid("messages is []; it must hold at least one message.", "messages")
    reader = _Reader({tool.name: tool for tool in tools})
    last_user = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=-1)
    found: list[tuple[Message, str]] = []
    text = without_billing_header(_text(system, "system", reader)) if system else ""
    if text:
        found.append(({"role": "system", "content": text}, "system"))
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if turn.role not in ROLES:
            raise invalid(
                f"{where}.role is {shown(turn.role)}; it must be one of {', '.join(ROLES)}.", "messages"
            )
        if turn.clear_at == "next_user_message" and index < last_user:
            continue
        for message in _messages_of(turn, where, reader):
            found.append((message, where))
    return _without_empty_prefill(*merge_messages(found))


def _without_empty_prefill(messages: list[Message], places: list[str]) -> tuple[list[Message], list[str]]:
    """Remove a final assistant message without text, which starts no answer. Raises `RequestError` for one with calls."""
    if not messages:
        raise invalid("messages has no text; send at least one message with text.", "messages")
    last = messages[-1]
    if last["role"] != "assistant" or (last["content"] and "tool_calls" not in last):
        return messages, places
    if len(messages) < 2 or "tool_calls" in last or "reasoning_content" in last:
        raise invalid(
            "messages ends with an assistant message without text; append the result of each tool_use as a "
            "tool_result block of a user message.",
            "messages",
        )
    return messages[:-1], places[:-1]


def _messages_of(turn: Turn, where: str, reader: _Reader) -> list[Message]:
    """Return the chat messages of one turn; none for a system message without text, which only sets options."""
    if turn.role not in ("assistant", "system"):
        given(turn.content, f"{where}.content")
    content = turn.content or ""
    if isinstance(content, str):
        return [{"role": turn.role, "content": content}] if content or turn.role != "system" else []
    if turn.role == "assistant":
        return [_assistant(content, f"{where}.content", reader)]
    results: list[Message] = []
    texts: list[str] = []
    # The image or document that an agent's tool has read may be beside the result instead of in it.
    has_result = turn.role == "user" and any(block.type == "tool_result" for block in content)
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        if block.type == "tool_result" and turn.role == "user":
            results.append(_result(block, at, reader))
        else:
            texts += _text_of(block, at, reader, is_result=has_result)
    if not texts and (results or turn.role == "system"):
        return results
    return [
        *results,
        {"role": turn.role, "content": "\n".join(texts)},
    ]  # templates expect results after their calls


def _result(block: ContentBlock, where: str, reader: _Reader) -> Message:
    call = given(block.tool_use_id, f"{where}.tool_use_id")
    content = _text(block.content or "", f"{where}.content", reader, is_result=True)
    return result_message(call, content, reader.names)


def _assistant(blocks: Sequence[ContentBlock], where: str, reader: _Reader) -> Message:
    """Return one message with text, reasoning and calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(given(block.thinking, f"{at}.thinking"))
            case "redacted_thinking":
                pass  # encrypted for Anthropic's models
            case "tool_use":
                call = given(block.id, f"{at}.id")
                name = reader.names[call] = given(block.name, f"{at}.name")
                sent = parse.json_of(block.input)
                arguments = parse.decode_part(block.input, _any_decoder, f"{at}.input") if sent else {}
                calls.append(call_of(call, name, arguments))
            case _:
                texts += _text_of(block, at, reader, is_answer=True)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(
    content: str | Sequence[ContentBlock] | ContentBlock,
    where: str,
    reader: _Reader,
    *,
    is_result: bool = False,
) -> str:
    if isinstance(content, str):
        return content
    blocks = [content] if isinstance(content, ContentBlock) else content
    return "\n".join(
        text
        for i, block in enumerate(blocks)
        for text in _text_of(block, f"{where}[{i}]", reader, is_result=is_result)
    )


def _text_of(
    block: ContentBlock, where: str, reader: _Reader, *, is_answer: bool = False, is_result: bool = False
) -> list[str]:
    """Return a block's texts; empty for blocks of server tools, and for unknown ones of an answer.

    In tool results, text replaces images, files and unknown blocks: an agent's conversation continues after them. Claude
    Code reads the place of an image or document in an error, as ``messages[0].content[0].image``, and removes the block.

    Raises `RequestError` for unsupported blocks.
    """
    match block.type:
        case "text":
            return [given(block.text, f"{where}.text")]
        case "document":
            return [_document(block, where, reader, is_result=is_result)]
        case "search_result":
            source = parse.json_of(block.source).decode().strip('"')
            found = _text(block.content or "", f"{where}.content", reader)
            return ["\n".join(filter(None, (block.title, source, found)))]
        case "tool_reference":
            return [_reference(given(block.tool_name or block.name, f"{where}.tool_name"), reader)]
        case "tool_addition" | "tool_removal":
            return _tool_change(block.type, given(block.tool, f"{where}.tool"), where, reader)
        case "compaction":
            return [_text(block.content or "", f"{where}.content", reader)]
        case "image" if not is_result:
            raise parse.not_implemented(f"{where}.image", "image input", "Send text.")
    if block.type.endswith(SERVER_BLOCKS) or is_answer:
        _log.info("%s, a block of type %s, was skipped: it is of another server's tool", where, block.type)
        return []
    if is_result:
        return [omitted_part(block.type, where)]
    raise parse.not_implemented(
        f"{where}: a block of type {shown(block.type)}",
        "content blocks of that type",
        "Send text; in assistant messages also thinking and tool_use, in user messages also tool_result.",
    )


def _tool_change(kind: str, tool: ReferencedTool, where: str, reader: _Reader) -> list[str]:
    """Return the text of a tool that is added or removed; empty for a tool of an MCP server or of Anthropic's."""
    name = tool.name or tool.tool_name or (None if tool.definition is None else tool.definition.own_name)
    is_hosted = tool.definition is not None and name not in reader.tools
    if name is None and tool.definition is None and tool.server_name is None:
        raise invalid(f"{where}.tool.name is missing; it is required.", "messages")
    if name is None or is_hosted:
        _log.info("%s.tool was skipped: this server runs no tools", where)
        return []
    return [_reference(name, reader) if kind == "tool_addition" else f"Tool removed: {name}"]


def _reference(name: str, reader: _Reader) -> str:
    """Return the text that announces a tool: its definition, if the template does not show it."""
    tool = reader.tools.get(name)
    if tool is None or not tool.is_deferred:
        return f"Tool available: {name}"
    definition = tool.definition()
    reader.num_definition_chars += len(definition)
    if reader.num_definition_chars > MAX_DEFINITION_CHARS:
        raise invalid(
            f"messages refers to deferred tools with definitions of more than {MAX_DEFINITION_CHARS} characters in total; "
            "refer to each tool once.",
            "messages",
        )
    return f"Tool available: {definition}"


def _document(block: ContentBlock, where: str, reader: _Reader, *, is_result: bool) -> str:
    """Return a document of text or of blocks, with its title."""
    source = parse.decode_part(block.source, _source, f"{where}.source")
    if source.type == "content" and source.content is not None:
        text = _text(source.content, f"{where}.source.content", reader, is_result=is_result)
        return f"{block.title}\n{text}" if block.title else text
    if source.type != "text" or source.data is None:
        if is_result:
            return omitted_part(block.type, where)
        raise parse.not_implemented(
            f"{where}.document, with a source of type {shown(source.type)},",
            "file input",
            "Send its text: a source of type text, with media_type text/plain.",
        )
    return f"{block.title}\n{source.data}" if block.title else source.data
