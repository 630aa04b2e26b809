"""Output items of a Responses API response, built incrementally for streamed and unstreamed responses.

    message        output_item.added  content_part.added  output_text.delta…     .done  content_part.done  output_item.done
    reasoning      output_item.added  content_part.added  reasoning_text.delta…  .done  content_part.done  output_item.done
    function_call  output_item.added  function_call_arguments.delta…             .done                     output_item.done

An item ends where the next one starts. Calls of other tools (`CallForm`) are sent at their end, from the whole JSON.
The events depend on the text alone, except for the boundaries of deltas.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quintet.frontend.api.channels import Channels
from quintet.frontend.api.openai.answer import AnswerOptions, encode_json
from quintet.frontend.api.openai.offered_tools import CallKind
from quintet.frontend.response_store import IN_PROGRESS
from quintet.frontend.resume.stream_state import Answer
from quintet.wire.channels import Channel
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Finish, FinishReason, Started

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
KINDS: dict[int, str] = {
    Channel.CONTENT: MESSAGE,
    Channel.REASONING: REASONING,
    Channel.NAME: CALL,
    Channel.ARGUMENTS: CALL,
}
PREFIXES = {
    MESSAGE: "msg",
    REASONING: "rs",
    CALL: "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""Prefixes of item ids, by item type."""
CUSTOM_INPUT = "response.custom_tool_call_input"
TEXTS = {
    MESSAGE: "response.output_text",
    REASONING: "response.reasoning_text",
    CALL: "response.function_call_arguments",
}
"""Event name prefixes of an item's text."""
COMPLETED, INCOMPLETE, FAILED, CANCELLED = "completed", "incomplete", "failed", "cancelled"

STATE_PREFIX = "quintet-reasoning-1."
"""Prefix of ``encrypted_content``: the text in base64, for clients that return only this field."""

Emit = Callable[[str, dict[str, Any]], None]
"""Receives an event: type and fields."""


CALL_KINDS: dict[str, CallKind] = {
    CALL: "function",
    "custom_tool_call": "custom",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
    "tool_search_call": "tool_search",
}
"""Tool kinds, by item type of their calls."""
CALL_TYPES = {kind: call_type for call_type, kind in CALL_KINDS.items()}


def reasoning_state(text: str) -> str:
    return STATE_PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def text_of_state(state: str | None) -> str | None:
    """Return the text of a reasoning item's ``encrypted_content``; None for another server's."""
    if state is None or not state.startswith(STATE_PREFIX):
        return None
    try:
        return base64.urlsafe_b64decode(state.removeprefix(STATE_PREFIX)).decode()
    except ValueError:
        return None


class CallForm(msgspec.Struct, array_like=True, frozen=True):
    """Output format of the calls of a tool that the model sees as a function."""

    kind: CallKind
    name: str
    """The client's tool name."""
    namespace: str | None = None

    def item(self, call_id: str, arguments: str) -> dict[str, Any]:
        """Return the fields of a call's item."""
        fields: dict[str, Any] = {"type": CALL_TYPES[self.kind], "call_id": call_id}
        match self.kind:
            case "function":
                fields |= {"name": self.name, "arguments": arguments}
            case "custom":
                fields |= {"name": self.name, "input": _input_of(self.name, arguments)}
            case "local_shell":
                fields["action"] = _local_shell_action(arguments)
            case "shell":
                fields["action"] = _shell_action(arguments)
            case "apply_patch":
                fields["operation"] = _decoded(arguments)
            case "tool_search":
                fields |= {"execution": "client", "arguments": _decoded(arguments)}
        return fields if self.namespace is None else {**fields, "namespace": self.namespace}


def _decoded(arguments: str) -> dict[str, Any]:
    """Return arguments as an object; an empty one if they are cut off or no object."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _input_of(name: str, arguments: str) -> str:
    """Return a freeform tool's input text. Models also write the text alone, in another parameter, or in a command line.

    Other arguments, such as those that are cut off, are returned unchanged.
    """
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    values = [found]
    if isinstance(found, dict):
        values = [found["input"]] if "input" in found else list(found.values())
    value = values[0] if len(values) == 1 else None
    if isinstance(value, list) and len(value) == 2 and value[0] == name:  # a command line
        value = value[1]
    return value if isinstance(value, str) else arguments


def _commands(sent: object) -> list[Any]:
    """Return a list of commands; models also write a single string."""
    return sent if isinstance(sent, list) else [str(sent or "")]


def _shell_action(arguments: str) -> dict[str, Any]:
    found = _decoded(arguments)
    return {
        "commands": _commands(found.get("commands")),
        "timeout_ms": found.get("timeout_ms"),
        "max_output_length": found.get("max_output_length"),
    }


def _local_shell_action(arguments: str) -> dict[str, Any]:
    found = _decoded(arguments)
    return {
        "type": "exec",
        "command": _commands(found.get("command")),
        "env": found.get("env") or {},
        "timeout_ms": found.get("timeout_ms"),
        "working_directory": found.get("workdir"),
        "user": None,
    }


class ResponsesAnswer(Answer, tag="responses"):
    """Event format of a response."""

    options: AnswerOptions
    channels: Channels
    head: bytes
    """JSON object: the response fields known from the request."""
    is_stored: bool = False
    """True if its end is stored."""
    conversation: str = ""
    """Id of its conversation, or ""."""
    calls: dict[str, CallForm] = msgspec.field(default_factory=dict)
    """By the function name that the model sees."""
    has_reasoning_state: bool = False
    """True if reasoning has ``encrypted_content``."""


@dataclass(slots=True)
class Item:
    """An output item."""

    kind: str
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    form: CallForm | None = None
    """Set for calls that are no plain function calls."""
    has_state: bool = False
    """True for reasoning with ``encrypted_content``."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)

    def place(self) -> dict[str, Any]:
        """Return the fields that locate the item's text in an event."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == CALL else {**place, "content_index": 0}

    @property
    def has_deltas(self) -> bool:
        """True if its text is sent in deltas."""
        return self.form is None or self.form.kind == "function"

    def part(self) -> dict[str, Any]:
        """Return the content part so far."""
        text = "".join(self.texts)
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": self.logprobs, "text": text}

    def whole(self, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        """Return the item; ``is_empty``: without content, as at its start."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.form is not None:
            return {**item, **self.form.item(self.call_id, "".join(self.texts))}
        if self.kind == CALL:
            return {**item, "call_id": self.call_id, "name": self.name, "arguments": "".join(self.texts)}
        content = [] if is_empty else [self.part()]
        if self.kind == REASONING:
            state = {"encrypted_content": reasoning_state("".join(self.texts))} if self.has_state else {}
            return {**item, "summary": [], "content": content, **({} if is_empty else state)}
        return {**item, "role": "assistant", "content": content}


class Items:
    """Items of one response so far; emits an event for every change."""

    def __init__(self, answer: ResponsesAnswer, emit: Emit) -> None:
        self._channels = answer.channels
        self._forms = answer.calls
        self._has_state = answer.has_reasoning_state
        self._response_id = answer.options.response_id
        self._emit = emit
        self.open: Item | None = None
        self.done: list[dict[str, Any]] = []

    def is_sent(self, channel: int, call: int) -> bool:
        """True if a piece is sent: no reasoning unless requested, and only the first call without parallel calls."""
        kind = KINDS[channel]
        if kind == CALL:
            return call == 0 or self._channels.parallel_calls
        return kind == MESSAGE or self._channels.include_reasoning

    def begin(self, channel: int, call: int, text: str) -> Item:
        """Return the item of a piece, and close the one before. For a call ``text`` is its name."""
        kind = KINDS[channel]
        if self.open is not None and self.open.kind == kind and channel != Channel.NAME:
            return self.open
        self.close(COMPLETED)
        index = len(self.done)
        item = Item(kind, f"{PREFIXES[kind]}_{self._response_id.partition('_')[2]}_{index}", index)
        if kind == CALL:
            item.name, item.call_id = text, self._channels.call_id(0, call, text)
            item.form = self._forms.get(text)
        item.has_state = self._has_state and kind == REASONING
        self.open = item
        added = {"output_index": index, "item": item.whole(IN_PROGRESS, is_empty=True)}
        self._emit("response.output_item.added", added)
        if kind != CALL:
            self._emit("response.content_part.added", {**item.place(), "part": item.part()})
        return item

    def close(self, status: str) -> None:
        """Close the open item, if any."""
        item, self.open = self.open, None
        if item is None:
            return
        text, place = "".join(item.texts), item.place()
        whole = item.whole(status)
        if not item.has_deltas:
            self._end_call(item, whole)
            return
        if item.kind == CALL:
            ending: dict[str, Any] = {"name": whole["name"], "arguments": text}
        else:
            ending = {"text": text, **({"logprobs": item.logprobs} if item.kind == MESSAGE else {})}
        self._emit(f"{TEXTS[item.kind]}.done", {**place, **ending})
        if item.kind != CALL:
            self._emit("response.content_part.done", {**place, "part": item.part()})
        self.done.append(whole)
        self._emit("response.output_item.done", {"output_index": item.index, "item": whole})

    def _end_call(self, item: Item, whole: dict[str, Any]) -> None:
        """Close a call that sends its input at once."""
        if "input" in whole:
            self._emit(f"{CUSTOM_INPUT}.delta", {**item.place(), "delta": whole["input"]})
            self._emit(f"{CUSTOM_INPUT}.done", {**item.place(), "input": whole["input"]})
        self.done.append(whole)
        self._emit("response.output_item.done", {"output_index": item.index, "item": whole})

    def finish(self, status: str) -> None:
        """Close the response; an empty one has one empty message."""
        if self.open is None and not self.done:
            self.begin(Channel.CONTENT, 0, "")
        self.close(status)


def status_of(finish: Finish) -> str:
    """Return the final status. Raises `RequestError` for an aborted response."""
    if finish.reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise RequestError(
            ErrorCode.INTERNAL, "The response was aborted inside the server; send the request again."
        )
    return INCOMPLETE if finish.reason is FinishReason.LENGTH else COMPLETED


def usage_of(started: Started | None, finish: Finish, num_output_tokens: int) -> dict[str, Any]:
    prompt = 0 if started is None else started.num_prompt_tokens
    cached = 0 if started is None else started.num_cached_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": finish.num_reasoning_tokens},
        "total_tokens": prompt + num_output_tokens,
    }


def response_json(
    head: bytes,
    status: str,
    output: list[dict[str, Any]],
    *,
    usage: dict[str, Any] | None = None,
    completed_at: int | None = None,
    error: RequestError | None = None,
) -> bytes:
    """Return a response as JSON: ``head`` and its current state."""
    return b"%b,%b" % (
        head[:-1],
        encode_json(
            {
                "status": status,
                "output": output,
                "usage": usage,
                "completed_at": completed_at,
                "error": None if error is None else _error_of(error),
                "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            }
        )[1:],
    )


def _error_of(error: RequestError) -> dict[str, str]:
    codes = {
        ErrorCode.INVALID: "invalid_prompt",
        ErrorCode.TOO_LONG: "context_length_exceeded",
        ErrorCode.OVERLOADED: "rate_limit_exceeded",
    }
    return {"code": codes.get(error.code, "server_error"), "message": error.message}
