"""Events of the Anthropic API, and the content blocks in them.

    message_start  ping  { content_block_start  content_block_delta…  content_block_stop }…  message_delta  message_stop

A block is text, thinking or one tool call; it ends where the next one starts. The cursor in an event id has: tokens
sent, characters sent of the text after them, and the blocks so far. Text after a token is a function of the tokens,
so any frontend can resume within a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256

import msgspec

from quintet.frontend.api import sse
from quintet.frontend.api.anthropic.errors import error_body
from quintet.frontend.api.channels import Channels
from quintet.frontend.api.openai.answer import encode_json
from quintet.frontend.api.outputs import Output
from quintet.frontend.resume.stream_state import Answer, StreamCursor, StreamId, StreamState
from quintet.frontend.resume.token_relay import ids_comment
from quintet.frontend.streams import Batch, OutputDelta, Stream, text_spans
from quintet.wire.channels import Channel
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Finish, FinishReason, Started

_NOTE = re.compile(r"(\d{1,6})([trscn])(?:\+(\d{1,9}))?")
SIGNATURE_CHARS = 24
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
NO_BLOCK, SIGNED = "n", "s"
"""Block states in addition to the text kinds: no open block; thinking block with its signature sent."""
KINDS: dict[int, str] = {
    Channel.CONTENT: "t",
    Channel.REASONING: "r",
    Channel.NAME: "c",
    Channel.ARGUMENTS: "c",
}
"""Letters of block kinds in cursors."""
DELTAS = {
    "t": b'{"type":"text_delta","text":',
    "r": b'{"type":"thinking_delta","thinking":',
    "c": b'{"type":"input_json_delta","partial_json":',
}
PLAIN = {kind: DELTAS[kind] for kind in ("t", "r")}
"""Kinds with text deltas that need no other state."""
UNREADABLE_INPUT = "INVALID_JSON"
"""Key for invalid JSON arguments in an unstreamed response."""


class MessagesAnswer(Answer, tag="messages"):
    """Event format of a response."""

    request_id: str
    model: str
    max_tokens: int
    channels: Channels


def usage_of(started: Started | None, num_output_tokens: int) -> dict[str, int]:
    """Return the ``usage`` object; cached prompt tokens are not input tokens."""
    prompt = 0 if started is None else started.num_prompt_tokens
    cached = 0 if started is None else started.num_cached_tokens
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": num_output_tokens,
    }


def message_of(answer: MessagesAnswer, output: Output) -> dict[str, object]:
    """Return an unstreamed response. Raises `RequestError` for an aborted one."""
    finish, num_tokens = output.finish, len(output.token_ids)
    is_cut = finish.reason is not FinishReason.STOP
    ending = _ending(answer, finish, num_tokens)
    if not answer.max_tokens:  # the prompt is only cached
        ending = {"stop_reason": "max_tokens", "stop_sequence": None}
        return {**_head(answer), "content": [], **ending, "usage": usage_of(output.stream.started, 0)}
    return {
        **_head(answer),
        "content": list(_blocks(answer, text_spans(output.text, output.spans), is_cut=is_cut)),
        **ending,
        "usage": {**usage_of(output.stream.started, num_tokens), **_thinking_usage(finish)},
    }


def _head(answer: MessagesAnswer) -> dict[str, object]:
    return {"id": f"msg_{answer.request_id}", "type": "message", "role": "assistant", "model": answer.model}


def _thinking_usage(finish: Finish) -> dict[str, object]:
    """Return the reasoning usage; empty without reasoning tokens."""
    thinking = finish.num_reasoning_tokens
    return {"output_tokens_details": {"thinking_tokens": thinking}} if thinking else {}


def _ending(answer: MessagesAnswer, finish: Finish, num_tokens: int) -> dict[str, object]:
    """Return stop reason and stop sequence. Raises `RequestError` for an aborted response."""
    reason, sequence = "end_turn", None
    match finish.reason:
        case FinishReason.LENGTH:
            is_whole = num_tokens >= answer.max_tokens
            reason = "max_tokens" if is_whole else "model_context_window_exceeded"
        case FinishReason.ABORT | FinishReason.ERROR:
            raise RequestError(
                ErrorCode.INTERNAL, "The response was aborted inside the server; send the request again."
            )
        case _ if finish.num_calls:  # takes precedence: the client has to run the tools
            reason = "tool_use"
        case _ if isinstance(finish.stop_reason, str):
            reason, sequence = "stop_sequence", finish.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def _signature(answer: MessagesAnswer, block: int) -> str:
    """Return the signature of a thinking block; clients send it back, and it is not checked."""
    return sha256(f"{answer.request_id}:{block}".encode()).hexdigest()[:SIGNATURE_CHARS]


def _is_sent(answer: MessagesAnswer, channel: int, call: int) -> bool:
    """True if a piece is sent. Without parallel calls only the first call is."""
    return KINDS[channel] != "c" or call == 0 or answer.channels.parallel_calls


def _blocks(
    answer: MessagesAnswer, output_pieces: Iterator[tuple[int, int, str]], *, is_cut: bool
) -> Iterator[dict[str, object]]:
    """Yield the content blocks of an unstreamed response; if it ``is_cut``, without an incomplete last call."""
    found: list[tuple[str, int, list[str]]] = []
    for channel, call, text in output_pieces:
        if not _is_sent(answer, channel, call):
            continue
        kind = KINDS[channel]
        if channel == Channel.NAME or not found or found[-1][0] != kind:
            found.append((kind, call, []))
        found[-1][2].append(text)
    for index, (kind, call, texts) in enumerate(found):
        if kind == "c":
            arguments = "".join(texts[1:])
            given = _input_of(arguments)
            if is_cut and index == len(found) - 1 and (not arguments or given is None):
                continue
            if given is None:
                given = {UNREADABLE_INPUT: arguments}
            call_id = answer.channels.call_id(0, call, texts[0])
            yield {"type": "tool_use", "id": call_id, "name": texts[0], "input": given}
        elif kind == "r":
            thinking, signature = "".join(texts), _signature(answer, index)
            yield {"type": "thinking", "thinking": thinking, "signature": signature}
        else:
            yield {"type": "text", "text": "".join(texts)}


def _input_of(arguments: str) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return None


class MessagesWriter:
    """Writer of the events of one response (an `AnswerWriter`)."""

    def __init__(
        self, answer: MessagesAnswer, stream_id: StreamId | None = None, position: StreamCursor | None = None
    ) -> None:
        """``stream_id``: events have ids and start after ``position``. Raises `RequestError` for a cursor of another API."""
        self._answer = answer
        self._position = position or StreamCursor(1)
        self.state = StreamState(stream_id, self._position)
        self._event_id = self.state.event_id
        num_blocks, kind, self._num_skipped = _state_of(self._position)
        self._set_open(num_blocks, kind)
        self._num_ahead = self._num_skipped
        """Characters sent of the text after the cursor's tokens."""
        self._has_failed = False

    # --- output -----------------------------------------------------------------------------------------------

    def write(self, frames: list[bytes], position: int, stream: Stream, batch: Batch) -> None:
        """See `AnswerWriter.write`. There is one prompt with one choice."""
        cursor = self._position
        if batch.started is not None and cursor.counts[0] is None:
            cursor.counts[0] = 0
            usage = usage_of(batch.started, 0)
            ending = {"stop_reason": None, "stop_sequence": None}
            message = {**_head(self._answer), "content": [], **ending, "usage": usage}
            frames.append(self._event("message_start", b'"message":' + encode_json(message)))
            frames.append(PING)
        num_taken = stream.choices[0].num_taken
        for delta in batch.deltas:
            if self.state.sends_ids and delta.token_ids:
                frames.append(ids_comment(0, delta.token_ids))
            if not self._is_more(delta):
                self._write_delta(frames, delta, num_taken, stream.started)
            elif delta.text:
                cursor.counts[0] = num_taken
                head = self._event_id and b"%b%d%b" % (self._event_id, num_taken, self._note)
                frames.append(b"%b%b%b}}\n\n" % (head, self._more, encode_json(delta.text)))

    def _is_more(self, delta: OutputDelta) -> bool:
        """True if a delta only continues the open text or thinking block: the common case."""
        if not self._more or self._num_skipped or delta.finish is not None:
            return False
        spans = delta.spans
        if not spans:
            return self._kind == "t"
        return len(spans) == 1 and KINDS[spans[0][0]] == self._kind and spans[0][2] == len(delta.text)

    def _write_delta(
        self, frames: list[bytes], delta: OutputDelta, num_taken: int, started: Started | None
    ) -> None:
        """Write a delta. The cursor of its last text event is after the delta's last token.

        The last delta is different: its text may include characters held back for earlier tokens until the end.
        """
        unseen = list(self._unseen(delta))
        sent = (i for i, (channel, call, _) in enumerate(unseen) if _is_sent(self._answer, channel, call))
        last = max(sent, default=-1) if delta.finish is None else -1
        for index, (channel, call, text) in enumerate(unseen):
            if not _is_sent(self._answer, channel, call):
                self._num_ahead += len(text)
                continue
            kind = KINDS[channel]
            is_name = channel == Channel.NAME
            if is_name or kind != self._kind:
                self._close_block(frames)
            if not is_name and self._kind == NO_BLOCK:
                self._open_block(frames, kind, call, "")
            self._num_ahead += len(text)
            if index == last:
                self._set_cursor(num_taken)
            if is_name:
                self._open_block(frames, kind, call, text)
            else:
                new = DELTAS[kind] + encode_json(text) + b"}"
                frames.append(
                    self._block_event("content_block_delta", self._num_blocks - 1, b'"delta":' + new)
                )
        if delta.finish is None:
            self._set_cursor(num_taken)
        else:
            self._close_block(frames)
            frames.append(self._finish(delta.finish, num_taken, started))

    def _finish(self, finish: Finish, num_taken: int, started: Started | None) -> bytes:
        """Return the event with the stop reason and the whole usage: LangChain reads it only here."""
        try:
            ending = _ending(self._answer, finish, num_taken)
        except RequestError as error:
            return self.failed(error)
        self._set_cursor(num_taken)
        self._position.ended[0] = True
        counts = {"output_tokens": num_taken} if started is None else usage_of(started, num_taken)
        usage = {**counts, **_thinking_usage(finish)}
        return self._event(
            "message_delta", b'"delta":' + encode_json(ending) + b',"usage":' + encode_json(usage)
        )

    def _set_cursor(self, num_taken: int) -> None:
        """Set the cursor after this many tokens, apart from characters still to skip."""
        self._position.counts[0] = num_taken
        self._num_ahead = self._num_skipped

    def _unseen(self, delta: OutputDelta) -> Iterator[tuple[int, int, str]]:
        """Yield the pieces of a delta, without the characters that the client has."""
        for channel, call, text in text_spans(delta.text, delta.spans):
            seen = min(self._num_skipped, len(text))
            self._num_skipped -= seen
            if seen < len(text):
                yield channel, call, text[seen:]

    def _open_block(self, frames: list[bytes], kind: str, call: int, text: str) -> None:
        index = self._num_blocks
        if kind == "c":
            call_id = self._answer.channels.call_id(0, call, text)
            block: dict[str, object] = {"type": "tool_use", "id": call_id, "name": text, "input": {}}
        elif kind == "r":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._set_open(index + 1, kind)
        frames.append(
            self._block_event("content_block_start", index, b'"content_block":' + encode_json(block))
        )

    def _close_block(self, frames: list[bytes]) -> None:
        if self._kind == NO_BLOCK:
            return
        index = self._num_blocks - 1
        if self._kind == "r":
            self._set_open(self._num_blocks, SIGNED)
            signature = {"type": "signature_delta", "signature": _signature(self._answer, index)}
            frames.append(
                self._block_event("content_block_delta", index, b'"delta":' + encode_json(signature))
            )
        self._set_open(self._num_blocks, NO_BLOCK)
        frames.append(self._block_event("content_block_stop", index))

    def _set_open(self, num_blocks: int, kind: str) -> None:
        """Set the open block, and precompute the head of its text events."""
        self._num_blocks, self._kind = num_blocks, kind
        self._note = b".%d%b\n" % (num_blocks, kind.encode())
        self._more = b""
        if kind in PLAIN:
            self._more = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b'
                % (num_blocks - 1, PLAIN[kind])
            )

    # --- start and end ----------------------------------------------------------------------------------------

    def tail(self, _streams: Sequence[Stream]) -> bytes:
        return b"" if self._has_failed else self._event("message_stop")

    def failed(self, error: RequestError) -> bytes:
        self._has_failed = True
        return b"event: error\ndata: " + error_body(error, self._answer.request_id) + b"\n\n"

    def silence(self) -> bytes:
        """See `AnswerWriter.silence`. Before the first event only a comment is sent."""
        return PING if self._position.counts[0] is not None else sse.KEEP_ALIVE

    # --- bytes ------------------------------------------------------------------------------------------------

    def _block_event(self, name: str, index: int, fields: bytes = b"") -> bytes:
        return self._event(name, b'"index":%d' % index + (b"," + fields if fields else b""))

    def _event(self, name: str, fields: bytes = b"") -> bytes:
        """Return an event with its cursor as id. ``fields`` is JSON, without the type."""
        data = b'{"type":"%b"%b}' % (name.encode(), b"," + fields if fields else b"")
        event = b"event: %b\ndata: %b\n\n" % (name.encode(), data)
        if not self._event_id:
            return event
        beyond = f"+{self._num_ahead}" if self._num_ahead else ""
        self._position.note = f"{self._num_blocks}{self._kind}{beyond}"
        return b"%b%b\n%b" % (self._event_id, str(self._position).encode(), event)


def _state_of(position: StreamCursor) -> tuple[int, str, int]:
    """Parse a cursor's note: number of blocks, kind of the open block, characters sent after the tokens."""
    match = position.read_note(_NOTE)
    if match is None:
        return 0, NO_BLOCK, 0
    return int(match[1]), match[2], int(match[3] or 0)
