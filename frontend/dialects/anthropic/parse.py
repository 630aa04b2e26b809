"""From the bodies of Anthropic's dialect to what chat templates and parameters are made of: a `ChatBody`.

Chat templates are written for OpenAI's messages: a turn of blocks becomes one message, or several where it holds results of
tools. What a model without images or servers of its own cannot do is refused here, by the name it has in this dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from quintet.frontend.dialects.anthropic.types import (
    Block,
    ConversationBody,
    MessagesBody,
    ThinkingChoice,
    ToolChoice,
    ToolDefinition,
    Turn,
)
from quintet.frontend.dialects.openai import parse
from quintet.frontend.dialects.openai.answer import encode_json
from quintet.frontend.dialects.openai.chat import decode_part
from quintet.frontend.dialects.openai.types import ChatBody, RawField, ResponseFormat
from quintet.wire.params import shown

ROLES = ("user", "assistant", "system")
MIN_THINKING = 1024
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
THINKING_KWARGS = ("enable_thinking", "thinking")
"""The names by which chat templates read whether the model shall reason."""
THEIR_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
}
"""Of fields, by those of the chat dialect."""

Message = dict[str, Any]
FieldT = TypeVar("FieldT")
_mapping = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _TextSource(msgspec.Struct, kw_only=True):
    type: str
    data: str | None = None


class _OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: RawField = msgspec.UNSET


_source = msgspec.json.Decoder(_TextSource)
_output_format = msgspec.json.Decoder(_OutputFormat)


def chat_body(body: ConversationBody) -> ChatBody:
    """Return the same request as the chat dialect spells it. Raises `RequestError`."""
    _refuse_unsupported(body)
    messages = messages_of(body.system, body.messages)
    chat = ChatBody(
        messages=msgspec.Raw(encode_json(messages)),
        model=body.model,
        chat_template_kwargs=_template_kwargs(body),
    )
    if messages[-1]["role"] == "assistant":  # the answer goes on with it
        chat.continue_final_message = True
    if body.tools:
        chat.tools = msgspec.Raw(encode_json([_tool(tool, i) for i, tool in enumerate(body.tools)]))
    if body.tool_choice is not None:
        chat.tool_choice = _choice(body.tool_choice)
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    chat.response_format = _format(body.output_format, "output_format")
    if body.output_config is not None:
        chat.reasoning_effort = body.output_config.effort
        form = _format(body.output_config.format, "output_config.format")
        chat.response_format = form or chat.response_format
    if isinstance(body, MessagesBody):
        _check_thinking(body.thinking, body.max_tokens)
        chat.max_tokens, chat.stop, chat.stream = body.max_tokens, body.stop_sequences, body.stream
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.seed = body.seed
        chat.cache_salt, chat.priority, chat.timeout = body.cache_salt, body.priority, body.timeout
    return chat


def messages_of(system: str | Sequence[Block] | None, turns: Sequence[Turn]) -> list[Message]:
    """Return the messages of a conversation as chat templates know them; neighbours of one role become one."""
    if not turns:
        raise parse.invalid("messages is []; it must hold at least one message.", "messages")
    found: list[Message] = []
    if system:
        found.append({"role": "system", "content": _text(system, "system")})
    names: dict[str, str] = {}
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if turn.role not in ROLES:
            raise parse.invalid(
                f"{where}.role is {shown(turn.role)}; it must be one of {', '.join(ROLES)}.", "messages"
            )
        for message in _messages_of(turn, where, names):
            if found and found[-1]["role"] == message["role"] != "tool":
                _join(found[-1], message)
            else:
                found.append(message)
    last = found[-1]
    if last["role"] == "assistant" and ("tool_calls" in last or not last["content"]):
        raise parse.invalid(
            "messages ends with an assistant's message that is no text; send the result of each tool_use as a "
            "tool_result in a user's message after it.",
            "messages",
        )
    return found


def _messages_of(turn: Turn, where: str, names: dict[str, str]) -> list[Message]:
    """Return what one turn becomes. ``names``: of the tools that were called, by the id of the call; grows."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(turn.content, f"{where}.content", names)]
    found: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            found.append({"role": turn.role, "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(turn.content):
        at = f"{where}.content[{index}]"
        if block.type == "tool_result" and turn.role == "user":
            flush()
            call = _given(block.tool_use_id, f"{at}.tool_use_id")
            result = {
                "role": "tool",
                "tool_call_id": call,
                "content": _text(block.content or "", f"{at}.content"),
            }
            found.append(result | ({"name": names[call]} if call in names else {}))
        else:
            texts.append(_text_of(block, at))
    flush()
    return found or [{"role": turn.role, "content": ""}]


def _assistant(blocks: Sequence[Block], where: str, names: dict[str, str]) -> Message:
    """Return one message: its text, reasoning and calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(_given(block.thinking, f"{at}.thinking"))
            case "redacted_thinking":
                pass  # nobody but who wrote it can read it
            case "tool_use":
                call = _given(block.id, f"{at}.id")
                names[call] = _given(block.name, f"{at}.name")
                function = {"name": names[call], "arguments": _arguments(block, at)}
                calls.append({"id": call, "type": "function", "function": function})
            case _:
                texts.append(_text_of(block, at))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _join(message: Message, more: Message) -> None:
    """Append a message of the same role."""
    message["content"] = "\n".join(filter(None, (message["content"], more["content"])))
    if "reasoning_content" in more:
        before = message.get("reasoning_content")
        message["reasoning_content"] = "\n".join(filter(None, (before, more["reasoning_content"])))
    if "tool_calls" in more:
        message["tool_calls"] = message.get("tool_calls", []) + more["tool_calls"]


def _arguments(block: Block, where: str) -> msgspec.Raw:
    encoded = parse.json_of(block.input)
    if not encoded.startswith(b"{"):
        sent = f"is {shown(encoded.decode())}" if encoded else "is missing"
        raise parse.invalid(f"{where}.input {sent}; it must be an object.", "messages")
    return msgspec.Raw(encoded)


def _text(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(block, f"{where}[{index}]") for index, block in enumerate(content))


def _text_of(block: Block, where: str) -> str:
    """Return the text of a block. Raises `RequestError` for one that is none."""
    if block.type == "text":
        return _given(block.text, f"{where}.text")
    if block.type == "document":
        return _document(block, where)
    if block.type == "image":
        raise parse.not_implemented(f"{where}: a block of type image", "models that see", "Send text.")
    raise parse.not_implemented(
        f"{where}: a block of type {shown(block.type)}",
        "blocks of that type here",
        "It takes text; in an assistant's message also thinking and tool_use, in a user's also tool_result.",
    )


def _document(block: Block, where: str) -> str:
    """Return a document that is plain text, under its title."""
    source = decode_part(block.source, _source, f"{where}.source")
    if source.type != "text" or source.data is None:
        raise parse.not_implemented(
            f"{where}: a document whose source is {shown(source.type)}",
            "a reader of files",
            "Send its text: a source of type text, with media_type text/plain.",
        )
    return f"{block.title}\n{source.data}" if block.title else source.data


def _given(value: FieldT | None, name: str) -> FieldT:
    if value is None:
        raise parse.invalid(f"{name} is missing; it is required.", "messages")
    return value


def _tool(tool: ToolDefinition, index: int) -> Message:
    if tool.type not in (None, "custom"):
        raise parse.not_implemented(
            f"tools[{index}], of type {shown(tool.type)},",
            "tools of its own",
            "Describe it as one of yours: name, description and input_schema.",
        )
    schema = decode_part(tool.input_schema, _mapping, f"tools[{index}].input_schema")
    function: Message = {"name": tool.name, "parameters": schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


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
    """Return the form of the output as the chat dialect spells it."""
    if not parse.json_of(raw):
        return None
    asked = decode_part(raw, _output_format, name)
    if asked.type != "json_schema":
        raise parse.invalid(f"{name}.type is {shown(asked.type)}; it must be 'json_schema'.", name)
    schema: dict[str, msgspec.Raw] = decode_part(asked.schema, _mapping, f"{name}.schema")
    named = {"name": "output", "schema": schema, "strict": True}
    return ResponseFormat(type=asked.type, json_schema=msgspec.Raw(encode_json(named)))


def _check_thinking(thinking: ThinkingChoice | None, max_tokens: int) -> None:
    budget = None if thinking is None else thinking.budget_tokens
    if budget is not None and not MIN_THINKING <= budget < max_tokens:
        raise parse.invalid(
            f"thinking.budget_tokens is {shown(budget)}; it must be at least {MIN_THINKING} and less than max_tokens, which "
            f"is {shown(max_tokens)}.",
            "thinking",
        )


def _template_kwargs(body: ConversationBody) -> msgspec.Raw:
    """Return the arguments of the chat template: the request's own, and whether the model shall reason."""
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        if body.thinking.type not in THINKING:
            raise parse.invalid(
                f"thinking.type is {shown(body.thinking.type)}; it must be one of {', '.join(THINKING)}.",
                "thinking",
            )
        kwargs = dict.fromkeys(THINKING_KWARGS, THINKING[body.thinking.type])
    if parse.json_of(body.chat_template_kwargs):
        own: dict[str, msgspec.Raw] = decode_part(body.chat_template_kwargs, _mapping, "chat_template_kwargs")
        kwargs.update(own)
    return msgspec.Raw(encode_json(kwargs))


def _refuse_unsupported(body: ConversationBody) -> None:
    if parse.json_of(body.thread):  # without it, the next request would hold nothing but its last turn
        raise parse.invalid(
            "thread was sent, but this server keeps no conversations; send the whole conversation each time, without "
            "thread.",
            "thread",
        )
    for name, raw in (("mcp_servers", body.mcp_servers), ("container", body.container)):
        if parse.json_of(raw) not in {b"", b"[]"}:
            raise parse.not_implemented(name, "servers of tools", "Run the tools, and send their results.")
