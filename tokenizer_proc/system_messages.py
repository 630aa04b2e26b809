"""Arrangements of messages for chat templates that refuse or drop some: one policy for every API.

The arrangements are tried in this order, and the first that the template renders counts:

1. as the client sent them;
2. the leading system messages merged into one, each later one a user's turn in its place;
3. as 2, and each such turn merged into the user's turn beside it, or into the result of a tool before it;
4. as 3, and the leading system message put before the text of the first user's turn.

Where none is taken, and messages have text and reasoning beside calls, all are tried again with the text behind the
reasoning: gpt-oss's template takes one of them.

A late message keeps its place, so that the prefix before it stays cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quintet.tokenizer_proc.chat_messages import REASONING, Message
from quintet.tokenizer_proc.template_values import NoContent, Parts, PartsText, text_part

SEPARATOR = "\n\n"
SHOWN_CHARS = 80


def arrangements(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the arrangements of a conversation, the client's own first."""
    yield from _of_system(messages)
    joined = [_with_text_in_reasoning(message) for message in messages]
    if any(one is not other for one, other in zip(joined, messages, strict=True)):
        yield from _of_system(joined)


def _with_text_in_reasoning(message: Message) -> Message:
    """Return a message whose text stands behind its reasoning, where it has both beside calls."""
    reasoning, content = message.get("reasoning_content"), message["content"]
    if not (message.get("tool_calls") and isinstance(reasoning, str) and reasoning and str(content)):
        return message
    thought = f"{reasoning}{SEPARATOR}{content!s}"
    return {**message, **dict.fromkeys(REASONING, thought), "content": NoContent()}


def _of_system(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the arrangements of system messages; without one there is nothing to arrange."""
    yield list(messages)
    if not any(message["role"] == "system" for message in messages):
        return
    leading = _num_leading(messages)
    late = any(message["role"] == "system" for message in messages[leading:])
    first = [_merged(messages[:leading])] if leading else []
    rest = list(messages[leading:])
    if leading > 1 or late:
        yield [*first, *(_as_user(message) for message in rest)]
    if late:
        rest = _joined_to_neighbours(rest)
        yield [*first, *rest]
    if first:
        yield _behind(first[0], rest)


def hides_system(messages: Sequence[Message], text: str) -> bool:
    """Whether a rendered text lacks a system message that is not the conversation's first message."""
    return any(
        message["role"] == "system" and not _is_shown(str(message["content"]), text)
        for message in messages[1:]
    )


def _is_shown(content: str, text: str) -> bool:
    """Whether the beginning of the longest line is in the text: templates trim and wrap."""
    line = max((line.strip() for line in content.split("\n")), key=len, default="")[:SHOWN_CHARS]
    return line in text or line.replace('"', '\\"') in text


def _num_leading(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _merged(messages: Sequence[Message]) -> Message:
    """Return one message with the contents of several."""
    first, *others = messages
    for other in others:
        first = {**first, "content": _join(first["content"], other["content"])}
    return first


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _joined_to_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Merge each system message into the user's turn or the tool's result beside it; else it is a turn of its own."""
    found: list[Message] = []
    takes_next = False
    """Whether the last message found was a system message, so that a user's turn goes on with it."""
    for message in messages:
        last = found[-1] if found else None
        is_system = message["role"] == "system"
        if last is not None and is_system and last["role"] in ("user", "tool"):
            found[-1] = {**last, "content": _join(last["content"], message["content"])}
            takes_next = last["role"] == "user"
        elif last is not None and takes_next and message["role"] == "user":
            found[-1] = {**message, "content": _join(last["content"], message["content"])}
            takes_next = False
        else:
            found.append(_as_user(message))
            takes_next = is_system
    return found


def _behind(system: Message, messages: Sequence[Message]) -> list[Message]:
    """Return messages with a system message before the text of the first user's turn, or as that turn."""
    if messages and messages[0]["role"] == "user":
        content = _join(system["content"], messages[0]["content"])
        return [{**messages[0], "content": content}, *messages[1:]]
    return [_as_user(system), *messages]


def _join(before: Any, behind: Any) -> Any:
    """Return two contents as one, in a form that the template reads."""
    for empty, other in ((before, behind), (behind, before)):
        if isinstance(empty, NoContent) or not empty:
            return other
    if isinstance(before, Parts) or isinstance(behind, Parts):
        return Parts([*_as_parts(before), *_as_parts(behind)])
    joined = f"{before!s}{SEPARATOR}{behind!s}"
    return PartsText(joined) if isinstance(before, PartsText) else joined


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return list(content) if isinstance(content, Parts) else [text_part(str(content))]
