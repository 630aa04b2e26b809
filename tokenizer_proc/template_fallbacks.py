"""Fallbacks for chat templates that reject a conversation or drop system messages, for all APIs.

Arrangements of messages are tried in this order; the first one that the template renders, without a hidden message, is used:

1. as the client sent them; then developer messages as system messages, which only some templates distinguish;
2. the leading system messages merged into one, each later system message converted to a user message;
3. as 2, and each converted message merged into the adjacent user message or the preceding tool result;
4. as 3, and the leading system message prepended to the first user message.

If all fail, they are tried again with one other change:

* Messages with calls, text and reasoning get the text appended to the reasoning: gpt-oss's template accepts one of the two.
* An answer without text and calls gets its reasoning as text: Ministral 3's template accepts no empty answer. Agents send it
  after an interruption.
* Several calls of a message become messages of one call, each before its result: Llama 3's template accepts no others.
* Turns alternate (Mistral, Gemma, Llama 2): a user message is merged into one before it, or into the result of a tool;
  an answer into one before it. An interrupted call gets a result, and an answer without any text is dropped. Agents append
  reminders and interruptions.

A late message keeps its position, so that the prefix before it still hits the prefix cache.

Other fallbacks replace variables of the template: the reasoning effort, and tools without optional fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_not
from typing import Any

from quintet.tokenizer_proc.chat_messages import REASONING
from quintet.tokenizer_proc.template_values import ContentParts, NoContent, PartsText, text_part
from quintet.wire.chat import Message

SEPARATOR = "\n\n"
SHOWN_CHARS = 80
NO_RESULT = "[no result: the call was interrupted]"
EFFORT = "reasoning_effort"
EFFORTS = {"none": 0, "no_think": 0, "minimal": 1, "low": 2, "medium": 3, "high": 4, "xhigh": 5, "max": 6}
"""Position of each effort. Agents send an effort with every request, and templates have scales of their own."""


def rearranged(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the arrangements of the messages other than the original."""
    if any(message["role"] == "developer" for message in messages):
        messages = [_with_role(message, "developer", "system") for message in messages]
        yield messages.copy()
    yield from _system_arrangements(messages)
    for changed in (
        [_with_text_in_reasoning(message) for message in messages],
        [_with_reasoning_as_text(message) for message in messages],
        _with_single_calls(messages),
    ):
        if any(one is not other for one, other in zip(changed, messages, strict=False)):
            yield changed.copy()
            yield from _system_arrangements(changed)
    for answered in (messages, [_with_reasoning_as_text(message) for message in messages]):
        for arranged in (answered, *_system_arrangements(answered)):
            turns = _alternating(arranged)
            if len(turns) != len(arranged) or any(map(is_not, turns, arranged)):
                yield turns


def _with_reasoning_as_text(message: Message) -> Message:
    """Use the reasoning of an answer without text and calls as its text."""
    reasoning = message.get("reasoning_content")
    if _is_answer(message) and not str(message["content"]) and isinstance(reasoning, str):
        return {**message, "content": PartsText(reasoning)}
    return message


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Split messages with several calls into messages of one call, each followed by its result."""
    found: list[Message] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results: dict[str, list[Message]] = {}
        while index < len(messages) and messages[index]["role"] == "tool":
            results.setdefault(str(messages[index].get("tool_call_id")), []).append(messages[index])
            index += 1
        for call in calls:
            found += [{**message, "tool_calls": [call]}, *results.pop(str(call.get("id")), ())]
            message = {"role": message["role"], "content": NoContent()}
        found += [result for others in results.values() for result in others]
    return found


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Merge messages of one side: a user's into a user's or a result before it, an answer into an answer before it.

    Calls without results get `NO_RESULT`. Answers without text, calls and reasoning are dropped.
    """
    found: list[Message] = []
    for message in messages:
        is_merged = False
        if message["role"] == "user":
            found += _missing_results(found[-1:])
            is_merged = bool(found) and found[-1]["role"] in ("user", "tool")
        elif _is_answer(message):
            is_merged = bool(found) and _is_answer(found[-1])
            is_empty = not (str(message["content"]) or message.get("reasoning_content"))
            if is_empty and message is not messages[-1]:
                continue
        if is_merged:
            found[-1] = {**found[-1], "content": _appended(found[-1]["content"], message["content"])}
        else:
            found.append(message)
    return [_with_joined_content(message) for message in found]


def _missing_results(messages: Sequence[Message]) -> list[Message]:
    """Return a result for each call of these messages."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    ids = [{"tool_call_id": call["id"]} if "id" in call else {} for call in calls]
    return [{"role": "tool", "content": PartsText(NO_RESULT), **call_id} for call_id in ids]


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _with_text_in_reasoning(message: Message) -> Message:
    """Append the text of a message to its reasoning if it has calls, text and reasoning."""
    reasoning, content = message.get("reasoning_content"), message["content"]
    if not (message.get("tool_calls") and isinstance(reasoning, str) and reasoning and str(content)):
        return message
    thought = f"{reasoning}{SEPARATOR}{content!s}"
    return {**message, **dict.fromkeys(REASONING, thought), "content": NoContent()}


def _system_arrangements(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the arrangements of system messages other than the original."""
    if not any(message["role"] == "system" for message in messages):
        return
    leading = _num_leading(messages)
    late = any(message["role"] == "system" for message in messages[leading:])
    first = [_merged(messages[:leading])] if leading else []
    rest = list(messages[leading:])
    if leading > 1 or late:
        yield [*first, *(_with_role(message, "system", "user") for message in rest)]
    if late:
        rest = _merge_into_adjacent(rest)
        yield [*first, *rest]
    if first:
        yield _with_system_in_user(first[0], rest)


def hides_system(messages: Sequence[Message], text: str) -> bool:
    """Return whether a rendered text lacks a developer message, or a system message other than the first message."""
    return any(
        (message["role"] == "developer" or (message["role"] == "system" and index > 0))
        and not _is_shown(str(message["content"]), text)
        for index, message in enumerate(messages)
    )


def _is_shown(content: str, text: str) -> bool:
    """Return whether the text has the beginning of the content's longest line: templates trim and wrap contents."""
    line = max((line.strip() for line in content.split("\n")), key=len, default="")[:SHOWN_CHARS]
    return line in text or line.replace('"', '\\"') in text


def _num_leading(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _merged(messages: Sequence[Message]) -> Message:
    """Merge messages into one."""
    return {**messages[0], "content": _join([message["content"] for message in messages])}


def _with_role(message: Message, role: str, new: str) -> Message:
    """Return a message of this role with a new one, and others unchanged."""
    return {**message, "role": new} if message["role"] == role else message


def _merge_into_adjacent(messages: Sequence[Message]) -> list[Message]:
    """Merge each system message into an adjacent user message or a preceding tool result, or convert it to a user message."""
    found: list[Message] = []
    is_joining_next = False
    """True if the last message was a system message, so that a following user message is merged into it."""
    for message in messages:
        last = found[-1] if found else None
        is_system = message["role"] == "system"
        if last is not None and is_system and last["role"] in ("user", "tool"):
            found[-1] = {**last, "content": _appended(last["content"], message["content"])}
            is_joining_next = last["role"] == "user"
        elif last is not None and is_joining_next and message["role"] == "user":
            found[-1] = {**message, "content": _appended(last["content"], message["content"])}
            is_joining_next = False
        else:
            found.append(_with_role(message, "system", "user"))
            is_joining_next = is_system
    return [_with_joined_content(message) for message in found]


def _with_system_in_user(system: Message, messages: Sequence[Message]) -> list[Message]:
    """Prepend a system message to the first user message, or insert it as a user message."""
    if messages and messages[0]["role"] == "user":
        content = _join([system["content"], messages[0]["content"]])
        return [{**messages[0], "content": content}, *messages[1:]]
    return [_with_role(system, "system", "user"), *messages]


class _Contents(list[Any]):
    """Contents of messages that are merged into one, until `_with_joined_content`: joining them once takes linear time."""


def _appended(before: Any, after: Any) -> _Contents:
    contents = before if isinstance(before, _Contents) else _Contents([before])
    contents.append(after)
    return contents


def _with_joined_content(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": _join(content)} if isinstance(content, _Contents) else message


def _join(contents: Sequence[Any]) -> Any:
    """Join contents in the format that the template reads."""
    shown = [each for each in contents if each and not isinstance(each, NoContent)] or [contents[-1]]
    if len(shown) == 1:
        return shown[0]
    if any(isinstance(each, ContentParts) for each in shown):
        return ContentParts([part for each in shown for part in _as_parts(each)])
    joined = SEPARATOR.join(map(str, shown))
    return PartsText(joined) if isinstance(shown[0], PartsText) else joined


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return list(content) if isinstance(content, ContentParts) else [text_part(str(content))]


def with_other_efforts(variables: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    """Return a template's variables with each other effort, nearest first and the higher of two, and last without one.

    Empty if the template does not read an effort, or the request's is not on the scale.
    """
    sent = variables.get(EFFORT)
    if EFFORT not in source or not isinstance(sent, str) or sent not in EFFORTS:
        return []
    others = [effort for effort in EFFORTS if effort != sent]
    others.sort(key=lambda effort: (abs(EFFORTS[effort] - EFFORTS[sent]), -EFFORTS[effort]))
    without = {name: value for name, value in variables.items() if name != EFFORT}
    return [*({**variables, EFFORT: effort} for effort in others), without]


def with_optional_fields(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools with a description and parameters for each function: optional in the APIs, required by some templates."""
    return [_complete(tool) for tool in tools]


def _complete(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    sent = {name: value for name, value in function.items() if value is not None}
    parameters = sent.get("parameters", {})
    if isinstance(parameters, dict):
        sent["parameters"] = {"type": "object", "properties": {}, **parameters}
    return {**tool, "function": {"description": "", **sent}}
