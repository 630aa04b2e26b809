"""What one streamed answer said, counted with as little work per event as can be.

A frame of server-sent events begins with ``data:`` at the start of a line; JSON escapes line ends, so that sequence
occurs nowhere else. Counting it is a search in bytes. JSON is decoded only for the frames up to the first one with text
(time to first token) and for the last ones (usage, errors).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec

_MARK = b"\ndata:"
_KEEP_BYTES = 8 << 10
_TRIM_BYTES = 32 << 10
_LAST_FRAMES = 8


class Delta(msgspec.Struct):
    """The part of a chat choice that carries text."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    def has_text(self) -> bool:
        """Whether anything was generated."""
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class ChunkChoice(msgspec.Struct):
    """One choice of a completion or chat chunk."""

    text: str | None = None
    delta: Delta | None = None


class CachedTokens(msgspec.Struct):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class ErrorBody(msgspec.Struct):
    """The OpenAI shape of an error."""

    message: str = ""
    type: str | None = None


class Chunk(msgspec.Struct):
    """One frame of a stream."""

    choices: list[ChunkChoice] = []
    usage: Usage | None = None
    error: ErrorBody | str | None = None

    def has_text(self) -> bool:
        """Whether any choice generated something in this frame."""
        return any(
            choice.text or (choice.delta is not None and choice.delta.has_text()) for choice in self.choices
        )


_decode_chunk = msgspec.json.Decoder(Chunk).decode


@dataclass(slots=True)
class StreamTally:
    """Counts the events of one streamed answer; feed it the body in pieces of any size."""

    read_times_s: array[float] = field(default_factory=lambda: array("d"))
    """When each socket read with new token events happened."""
    read_events: array[int] = field(default_factory=lambda: array("L"))
    """Token events in each of those reads."""
    num_events: int = 0
    first_s: float | None = None
    """When the first frame with text arrived."""
    last_s: float = 0.0
    usage: Usage | None = None
    error: str | None = None
    done: bool = False
    """Whether the stream ended with ``[DONE]``."""
    _buffer: bytearray = field(default_factory=lambda: bytearray(b"     \n"))
    _scanned: int = 6

    def feed(self, payload: bytes, now_s: float) -> None:
        """Take the next piece of the body, which arrived at ``now_s``."""
        buffer = self._buffer
        start = len(buffer) - 5
        buffer += payload
        if self.first_s is None:
            self._look_for_first(now_s)
            return
        num = buffer.count(_MARK, start)
        if num:
            self.num_events += num
            self.read_times_s.append(now_s)
            self.read_events.append(num)
            if len(buffer) > _TRIM_BYTES:
                del buffer[:-_KEEP_BYTES]

    def finish(self, now_s: float) -> None:
        """The body is complete: read the last frames, and take those without text out of the count."""
        self.last_s = now_s
        frames = _frames(bytes(self._buffer))[-_LAST_FRAMES:]
        surplus = 0
        text_seen = False
        for frame in reversed(frames):
            if frame == b"[DONE]":
                self.done = True
                surplus += not text_seen
                continue
            chunk = _read_chunk(frame)
            if chunk is None:
                continue
            if self.usage is None:
                self.usage = chunk.usage
            if chunk.error is not None:
                self.error = chunk.error if isinstance(chunk.error, str) else chunk.error.message
            text_seen = text_seen or chunk.has_text()
            surplus += not text_seen
        self._take_back(surplus)
        self._buffer = bytearray()

    def _look_for_first(self, now_s: float) -> None:
        """Decode frames that are whole until one has text; it and what follows it in the buffer are token events."""
        buffer = self._buffer
        while True:
            end = _end_of_frame(buffer, self._scanned)
            if end is None:
                return
            chunk = _read_chunk(_content(bytes(buffer[self._scanned : end])))
            if chunk is not None and chunk.has_text():
                self.first_s = now_s
                self.num_events = buffer.count(_MARK, self._scanned - 1)
                self.read_times_s.append(now_s)
                self.read_events.append(self.num_events)
                return
            self._scanned = end

    def _take_back(self, surplus: int) -> None:
        surplus = min(surplus, self.num_events)
        self.num_events -= surplus
        while surplus and self.read_events:
            taken = min(surplus, self.read_events[-1])
            self.read_events[-1] -= taken
            surplus -= taken
            if self.read_events[-1] == 0:
                self.read_events.pop()
                self.read_times_s.pop()


def _end_of_frame(buffer: bytearray, start: int) -> int | None:
    """Return where the frame that begins at ``start`` ends (after its blank line), or None while it is incomplete."""
    plain, carriage = buffer.find(b"\n\n", start), buffer.find(b"\r\n\r\n", start)
    if plain < 0 and carriage < 0:
        return None
    if carriage >= 0 and (plain < 0 or carriage < plain):
        return carriage + 4
    return plain + 2


def _content(frame: bytes) -> bytes:
    """Return what follows ``data:`` in a frame; empty for comments."""
    for line in frame.splitlines():
        if line.startswith(b"data:"):
            return line[5:].strip()
    return b""


def _frames(body: bytes) -> list[bytes]:
    """Return the contents of the ``data:`` lines."""
    return [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]


def _read_chunk(content: bytes) -> Chunk | None:
    try:
        return _decode_chunk(content)
    except msgspec.MsgspecError:
        return None
