"""Events of a streamed Responses API response, ordered and numbered.

    response.created  response.in_progress  { the events of an item }…  response.completed | incomplete | failed

Later events repeat earlier content. So a resumed stream is rebuilt from its start, without the part that the client has. The
cursor in an event id has: number of the next event, characters sent, and events after them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from quintet.frontend.api import sse
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.openai.logprobs import chat_logprobs
from quintet.frontend.api.outputs import Output
from quintet.frontend.api.responses.output import (
    CALL_KINDS,
    CANCELLED,
    COMPLETED,
    FAILED,
    MESSAGE,
    REASONING,
    TEXTS,
    CallForm,
    Item,
    Items,
    ResponsesAnswer,
    response_json,
    status_of,
    usage_of,
)
from quintet.frontend.response_store import IN_PROGRESS
from quintet.frontend.resume.stream_state import StreamCursor, StreamId, StreamState
from quintet.frontend.resume.token_relay import WITHDRAWN, ids_comment
from quintet.frontend.streams import Batch, OutputDelta, Stream, text_spans
from quintet.wire.channels import Channel
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Finish, PositionLogprobs, Started

_NOTE = re.compile(r"(\d{1,9})\+(\d{1,9})\+(\d{1,3})")


class _EndedPart(msgspec.Struct):
    text: str


class _EndedItem(msgspec.Struct):
    type: str
    status: str
    content: list[_EndedPart] = []
    name: str = ""
    namespace: str | None = None
    arguments: str | dict[str, Any] = ""
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None

    def call(self, forms: Mapping[str, CallForm]) -> tuple[str, str] | None:
        """Return a call's name and arguments as the model wrote them; None if the item is no call."""
        kind = CALL_KINDS.get(self.type)
        if kind is None:
            return None
        named = (kind, self.name, self.namespace) if self.name else (kind,)
        names = (
            name
            for name, form in forms.items()
            if (form.kind, form.name, form.namespace)[: len(named)] == named
        )
        if self.input is not None:
            arguments = encode_json({"input": self.input}).decode()
        elif self.action is not None and kind == "local_shell":
            action = {**self.action, "workdir": self.action.get("working_directory")}
            arguments = encode_json(action).decode()
        elif self.action is not None or self.operation is not None:
            arguments = encode_json(self.action or self.operation).decode()
        else:
            given = self.arguments
            arguments = given if isinstance(given, str) else encode_json(given).decode()
        return next(names, self.name), arguments


class _Ended(msgspec.Struct):
    """Fields read of an ended response."""

    status: str
    output: list[_EndedItem]


def response_of_output(answer: ResponsesAnswer, output: Output) -> tuple[str, bytes]:
    """Return status and JSON of an unstreamed response. Raises `RequestError` for an aborted one."""
    status, num_tokens = status_of(output.finish), len(output.token_ids)
    items = Items(answer, lambda _name, _fields: None)
    logprobs = _logprobs(answer, output.logprobs)
    for channel, call, text in text_spans(output.text, output.spans):
        if (text or channel == Channel.NAME) and items.is_sent(channel, call):
            item = items.begin(channel, call, text)
            if channel != Channel.NAME:
                item.texts.append(text)
            if item.kind == MESSAGE:
                item.logprobs, logprobs = item.logprobs + logprobs, []
    items.finish(status)
    usage = usage_of(output.stream.started, output.finish, num_tokens)
    completed_at = _completed_at(status)
    return status, response_json(answer.head, status, items.done, usage=usage, completed_at=completed_at)


def _completed_at(status: str) -> int | None:
    return int(time.time()) if status == COMPLETED else None


def _logprobs(answer: ResponsesAnswer, positions: Sequence[PositionLogprobs]) -> list[object]:
    """Return log-probabilities in the format of message parts."""
    if answer.options.logprobs is None or not positions:
        return []
    content: Any = chat_logprobs(positions, answer.options)["content"]
    return list(content)


class ResponsesWriter:
    """Writer of the events of one response (an `AnswerWriter`)."""

    def __init__(
        self, answer: ResponsesAnswer, stream_id: StreamId | None = None, position: StreamCursor | None = None
    ) -> None:
        """``stream_id``: events have ids. Events up to ``position`` are skipped, but the writer needs the output from its
        start. Raises `RequestError` for a cursor of another API."""
        self.answer, options = answer, answer.options
        self._position = position or StreamCursor(1)
        # With log-probabilities the last event repeats those of all tokens, and the relay does not store them.
        is_relayable = options.logprobs is None
        self.state = StreamState(
            stream_id, self._position, options.created, options.response_id, is_relayable
        )
        self._num_known = self._position.counts[0] or 0
        """Tokens for which the client needs no comment."""
        self._event_id = self.state.event_id
        self._number, *seen = _state_of(self._position)
        self._seen = (seen[0], seen[1])
        self._num_chars = self._num_events_after = 0
        """Characters so far, and events after the last of them."""
        self._items = Items(answer, self._emit)
        self._frames: list[bytes] = []
        self._more = b""
        """Head of a delta event for the open message; empty without one, or if the event needs other fields."""
        self._logprobs: list[object] = []
        """Log-probabilities of tokens that were not sent yet."""
        self._started: Started | None = None
        self.sends_keep_alive_events = False
        """True if an idle stream has events instead of comments."""
        self.status = IN_PROGRESS
        self.response = b""
        """The whole response as JSON, after its end."""

    @property
    def last_number(self) -> int:
        return self._number - 1

    @property
    def position(self) -> str:
        """Cursor after the last event."""
        self._position.note = f"{self._number}+{self._num_chars}+{self._num_events_after}"
        return str(self._position)

    # --- output -----------------------------------------------------------------------------------------------

    def write(self, frames: list[bytes], position: int, stream: Stream, batch: Batch) -> None:
        """See `AnswerWriter.write`. There is one prompt with one choice."""
        self._frames = frames
        if batch.started is not None and self._started is None:
            self._started = batch.started
            self._position.counts[0] = self._position.counts[0] or 0
            self._begin()
        for delta in batch.deltas:
            self._position.counts[0] = num_taken = stream.choices[0].num_taken
            if self.state.sends_ids:
                self._emit_ids(delta.token_ids, num_taken)
            if self._more and _is_more(delta):
                if delta.text:
                    self._write_more(delta.text, num_taken)
            else:
                self._write_delta(delta)
            if delta.finish is not None:
                self._finish(delta.finish, stream.num_output_tokens)

    def _emit_ids(self, token_ids: Sequence[int], num_taken: int) -> None:
        """Send the ids of new tokens, the last of which has number ``num_taken``, except those that the client has."""
        num_new = min(len(token_ids), num_taken - self._num_known)
        if num_new > 0:
            self._frames.append(ids_comment(0, token_ids[-num_new:]))

    def _begin(self) -> None:
        started_json = msgspec.Raw(response_json(self.answer.head, IN_PROGRESS, []))
        self._emit("response.created", {"response": started_json})
        self._emit("response.in_progress", {"response": started_json})

    def replay(self, response: bytes) -> Iterator[bytes]:
        """Yield the events of an ended response, with each text in a single delta."""
        frames = self._frames
        self._begin()
        ended = msgspec.json.decode(response, type=_Ended)
        num_calls = 0
        for item in ended.output:
            call = item.call(self.answer.calls)
            if call is not None:
                name, text = call
                spans = [
                    (int(Channel.NAME), num_calls, len(name)),
                    (int(Channel.ARGUMENTS), num_calls, len(text)),
                ]
                num_calls += 1
            else:
                name, text = "", "".join(part.text for part in item.content)
                spans = [
                    (int(Channel.REASONING if item.type == REASONING else Channel.CONTENT), 0, len(text))
                ]
            self._write_delta(OutputDelta(0, name + text, (), [], None, spans))
        self._items.close(ended.output[-1].status if ended.output else ended.status)
        if ended.status != CANCELLED:
            self._emit(f"response.{ended.status}", {"response": msgspec.Raw(response)})
        yield from frames

    def _write_more(self, text: str, num_taken: int) -> None:
        """Write a delta of the open message. Hot path."""
        item = self._items.open
        assert item is not None, "delta without an open item"
        item.texts.append(text)
        self._num_chars += len(text)
        self._num_events_after = 0
        number, self._number = self._number, self._number + 1
        head = self._event_id and b"%b%d.%d+%d+0\n" % (
            self._event_id,
            num_taken,
            number + 1,
            self._num_chars,
        )
        self._frames.append(b'%b%b%d,"delta":%b}\n\n' % (head, self._more, number, encode_json(text)))

    def _write_delta(self, delta: OutputDelta) -> None:
        self._more = b""
        self._logprobs += _logprobs(self.answer, delta.logprobs)
        for channel, call, text in self._pieces(delta):
            if self._items.is_sent(channel, call):
                item = self._items.begin(channel, call, text)
                if channel != Channel.NAME:
                    item.texts.append(text)
                    if item.has_deltas:
                        self._emit_text(item, text)
                        continue
            self._num_chars += len(text)
            self._num_events_after = 0
        item_open = self._items.open
        if item_open is None or item_open.kind != MESSAGE:
            if delta.text:
                self._logprobs = []  # they belong to another channel
        elif self._num_chars >= self._seen[0] and self.answer.options.logprobs is None:
            self._more = _delta_head(item_open)

    def _pieces(self, delta: OutputDelta) -> Iterator[tuple[int, int, str]]:
        return (
            (c, n, text) for c, n, text in text_spans(delta.text, delta.spans) if text or c == Channel.NAME
        )

    def _emit_text(self, item: Item, text: str) -> None:
        """Send a piece of an item's text, without the characters that the client has."""
        fields: dict[str, Any] = item.place()
        if item.kind == MESSAGE:
            fields["logprobs"], self._logprobs = self._logprobs, []
            item.logprobs += fields["logprobs"]
        num_seen = max(0, self._seen[0] - self._num_chars)
        self._num_chars += len(text)
        self._num_events_after = 0
        if num_seen < len(text):
            self._event(f"{TEXTS[item.kind]}.delta", {**fields, "delta": text[num_seen:]})

    def _finish(self, finish: Finish, num_tokens: int) -> None:
        """Send the final events."""
        try:
            status = status_of(finish)
        except RequestError as error:
            self._frames.append(self.failed(error))
            return
        if self._items.open is not None:
            self._items.open.logprobs += self._logprobs
        self._items.finish(status)
        self.status = status
        self._position.ended[0] = True
        self._more = b""
        self.response = response_json(
            self.answer.head,
            status,
            self._items.done,
            usage=usage_of(self._started, finish, num_tokens),
            completed_at=_completed_at(status),
        )
        self._emit(f"response.{status}", {"response": msgspec.Raw(self.response)})

    # --- start and end ----------------------------------------------------------------------------------------

    def tail(self, _streams: Sequence[Stream]) -> bytes:
        """See `AnswerWriter.tail`. The final event was sent with the last text."""
        return b""

    def failed(self, error: RequestError) -> bytes:
        """See `AnswerWriter.failed`. The event has no id: the stream cannot be resumed after it."""
        self._more = b""
        self.status = FAILED
        self.response = response_json(self.answer.head, FAILED, self._items.done, error=error)
        number, self._number = self._number, self._number + 1
        fields = {"sequence_number": number, "response": msgspec.Raw(self.response)}
        is_withdrawn = self.state.sends_ids and error.code is ErrorCode.UNAVAILABLE
        return (WITHDRAWN if is_withdrawn else b"") + _frame("response.failed", fields)

    def failed_at_start(self, error: RequestError) -> bytes:
        """Return all events of a response that failed before its first event."""
        self._begin()
        return b"".join([*self._frames, self.failed(error)])

    def silence(self) -> bytes:
        if self.sends_keep_alive_events:
            return sse.KEEP_ALIVE_EVENT
        return sse.KEEP_ALIVE_WITH_IDS if self._event_id else sse.KEEP_ALIVE

    # --- bytes ------------------------------------------------------------------------------------------------

    def _emit(self, name: str, fields: dict[str, Any]) -> None:
        """Write an event that is no text delta, unless the client has it."""
        self._num_events_after += 1
        if (self._num_chars, self._num_events_after) > self._seen:
            self._event(name, fields)

    def _event(self, name: str, fields: dict[str, Any]) -> None:
        """Write an event with its cursor as id."""
        frame = _frame(name, {"sequence_number": self._number, **fields})
        self._number += 1
        self._position.note = f"{self._number}+{self._num_chars}+{self._num_events_after}"
        head = self._event_id and b"%b%b\n" % (self._event_id, str(self._position).encode())
        self._frames.append(head + frame)


def _is_more(delta: OutputDelta) -> bool:
    """True if a delta only continues the message: the common case."""
    if delta.finish is not None:
        return False
    spans = delta.spans
    return not spans or (
        len(spans) == 1 and spans[0][0] == Channel.CONTENT and spans[0][2] == len(delta.text)
    )


def _frame(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json({"type": name, **fields}))


def _delta_head(item: Item) -> bytes:
    """Return the head of a message's delta event, up to its number."""
    name = f"{TEXTS[MESSAGE]}.delta"
    fields = encode_json({"type": name, **item.place(), "logprobs": []})
    return b'event: %b\ndata: %b,"sequence_number":' % (name.encode(), fields[:-1])


def _state_of(position: StreamCursor) -> tuple[int, int, int]:
    """Parse a cursor's note: number of the next event, characters sent, events after them."""
    match = position.read_note(_NOTE)
    if match is None:
        return 0, 0, 0
    return int(match[1]), int(match[2]), int(match[3])
