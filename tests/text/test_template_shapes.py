"""Client messages in templates of published shapes: equal to transformers, or an error that names the message."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import jinja2
import pytest
from tests.text.template_shapes import SHAPES, Shape
from transformers.utils.chat_template_utils import render_jinja_template

from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.wire.chat import encode_messages
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import ChatPrompt

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {"town": "Köln", "days": [1, 2], "unit": None}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
USER = {"role": "user", "content": "How warm is it?"}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": '{"warm": 4}'}

Message = dict[str, Any]


def called(*arguments: Any, **fields: Any) -> Message:
    """Return a message with tool calls."""
    calls = [
        {"id": f"abcdef12{i}", "type": "function", "function": {"name": "weather", "arguments": each}}
        for i, each in enumerate(arguments, 3)
    ]
    return {"role": "assistant", "content": None, **fields, "tool_calls": calls}


def parts(*texts: str) -> list[Message]:
    """Return a content of several parts."""
    return [{"type": "text", "text": text} for text in texts]


CHATS: dict[str, list[Message]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "Warm.\n"}, {"role": "user", "content": " So? "}],
    "parts": [{"role": "user", "content": parts("How warm", "is it?")}],
    "parts everywhere": [
        {"role": "system", "content": parts("Be brief.")},
        {"role": "user", "content": parts("a")},
        {"role": "assistant", "content": parts("b", "c")},
        {"role": "user", "content": parts("d")},
    ],
    "call": [USER, called(TEXT), RESULT],
    "call with an object": [USER, called(ARGUMENTS), RESULT],
    "call with empty text": [USER, called(TEXT, content=""), RESULT],
    "call without content": [USER, {k: v for k, v in called(TEXT).items() if k != "content"}, RESULT],
    "call after text": [
        USER,
        called(TEXT, content="I look."),
        RESULT,
        {"role": "assistant", "content": "4"},
        USER,
    ],
    "call without arguments": [USER, called(""), RESULT],
    "two calls": [USER, called(TEXT, "{}"), RESULT, {**RESULT, "tool_call_id": "abcdef124"}],
    "calls one by one": [
        USER,
        called(TEXT),
        RESULT,
        called() | {"tool_calls": called(TEXT, "{}")["tool_calls"][1:]},
        {**RESULT, "tool_call_id": "abcdef124"},
    ],
    "result in parts": [USER, called(TEXT), {**RESULT, "content": parts("4", "C")}],
    "no calls": [USER, {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None}, USER],
    "reasoning": [USER, {"role": "assistant", "content": "x", "reasoning_content": "hm"}, USER],
    "thinking": [
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, *parts("x")]},
        USER,
    ],
    "continued": [USER, {"role": "assistant", "content": "x", "reasoning": "hm"}],
    "result without a call": [USER, RESULT],
    "two users": [USER, USER],
}


def ours(source: str, messages: list[Message], **fields: Any) -> str:
    return ChatTemplates({"default": source}, SPECIAL).render(ChatPrompt(encode_messages(messages), **fields))


def prepared(messages: list[Message], shape: Shape) -> list[Message]:
    """Return messages in the form that the template's author expects with transformers."""
    messages = copy.deepcopy(messages)
    for message in messages:
        message["content"] = _content(message, shape)
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"] or {}
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            as_text = json.dumps(arguments, ensure_ascii=False)
            call["function"]["arguments"] = as_text if shape.arguments == "text" else arguments
    return messages


def _content(message: Message, shape: Shape) -> Any:
    content = message.get("content")
    if content is None:
        return None if shape.null == "none" else parts("") if shape.content == "only parts" else ""
    if isinstance(content, list) and "part.thinking" not in shape.source:
        thoughts = [part["thinking"] for part in content if part["type"] == "thinking"]
        if thoughts:
            message["reasoning_content"] = thoughts[0]
        content = [part for part in content if part["type"] == "text"]
    if shape.content == "string" and isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return parts(content) if shape.content == "only parts" and isinstance(content, str) else content


def theirs(shape: Shape, messages: list[Message]) -> str:
    """Return the rendering of transformers, by the function under `apply_chat_template`, without its removal of nulls."""
    (text,), _ = render_jinja_template(
        [prepared(messages, shape)], chat_template=shape.source, add_generation_prompt=True, **SPECIAL
    )
    for message in messages:  # a template for text only would write the list as Python
        if isinstance(message.get("content"), list):
            joined = "\n".join(part["text"] for part in message["content"] if "text" in part)
            text = text.replace(str(message["content"]), joined)
    return text


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", SHAPES)
def test_rendering_equals_transformers_or_names_a_message(name: str, chat: str) -> None:
    shape = SHAPES[name]
    try:
        expected = theirs(shape, CHATS[chat])
    except (jinja2.exceptions.TemplateError, TypeError):
        if (name, chat) == ("llama 3.1", "two calls"):  # it accepts one call at once
            assert ours(shape.source, CHATS[chat]) == theirs(shape, CHATS["calls one by one"])
            return
        if chat == "two users":  # it accepts alternating turns only
            merged = {"role": "user", "content": f"{USER['content']}\n\n{USER['content']}"}
            assert ours(shape.source, CHATS[chat]) == theirs(shape, [merged])
            return
        if any(message["role"] == "system" for message in CHATS[chat]):
            assert "Be brief." in ours(shape.source, CHATS[chat])
            return
        with pytest.raises(RequestError) as caught:
            ours(shape.source, CHATS[chat])
        assert caught.value.code is ErrorCode.INVALID
        assert re.fullmatch(r"messages\[\d\]", caught.value.param or "")
        assert str(caught.value.param) in caught.value.message
        return
    assert ours(shape.source, CHATS[chat]) == expected


@pytest.mark.parametrize("name", ["gemma 3", "deepseek r1", "glm 4.5", "kimi k2", "llama 4"])
def test_null_content_is_rendered_as_by_transformers_which_removes_it(name: str) -> None:
    without: list[Message] = [USER, {"role": "assistant"}, USER]
    (expected,), _ = render_jinja_template(
        [without], chat_template=SHAPES[name].source, add_generation_prompt=True, **SPECIAL
    )
    assert ours(SHAPES[name].source, [USER, {"role": "assistant", "content": None}, USER]) == expected


@pytest.mark.parametrize(
    "arguments",
    ['{"town": "Oslo', '{"a": "He said "hi""}', "[1, 2]", "5", '"text"', "null", r'{"a": "\ud800"}'],
)
@pytest.mark.parametrize("name", SHAPES)
def test_a_past_call_with_invalid_arguments_is_accepted(name: str, arguments: str) -> None:
    source = SHAPES[name].source
    if _is_accepted(source, "{}"):
        text = ours(source, [USER, called(arguments), RESULT])
        "".join(text).encode()
        if arguments != "null" and "arguments" in source:
            assert arguments in text or json.dumps(arguments)[1:-1] in text
    assert not _is_accepted(source, arguments) or _is_accepted(source, "{}")


def _is_accepted(source: str, arguments: str) -> bool:
    try:
        ours(source, [USER, called(arguments), RESULT])
    except RequestError:
        return False
    return True
