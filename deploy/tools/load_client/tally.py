"""Event counter of a streamed response with minimal work per event.

An SSE frame starts with ``data:`` at the start of a line. JSON escapes newlines, so counting frames is a byte search. JSON is
decoded only up to the first frame with text (time to first token) and for the last frames (usage, errors).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec

_MARK = b"\ndata:"
_KEEP_BYTES = 8 << 10
_TRIM_BYTES = 32 << 10
_LAST_FRAMES = 8


class ChunkDelta(msgspec.Struct):
    """Text fields of a chat choice."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    def has_text(self) -> bool:
        """Return whether the delta has generated content."""
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class ChunkChoice(msgspec.Struct):
    """One choice of a completion or chat chunk."""

    text: str | None = None
    delta: ChunkDelta | None = None


class CachedTokens(msgspec.Struct):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class ErrorBody(msgspec.Struct):
    """Error object of the OpenAI API."""

    message: str = ""
    type: str | None = None


class Chunk(msgspec.Struct):
    """One frame of a stream."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: ErrorBody | str | None = None

    def has_text(self) -> bool:
        """Return whether any choice of the frame has generated content."""
        return any(
            choice.text or (choice.delta is not None and choice.delta.has_text()) for choice in self.choices
        )


_decode_chunk = msgspec.json.Decoder(Chunk).decode


@dataclass(slots=True)
class StreamTally:
    """Counts the events of one streamed response, fed in chunks of any size."""

    read_times_s: array[float] = field(default_factory=lambda: array("d"))
    """Times of socket reads with new token events."""
    read_events: array[int] = field(default_factory=lambda: array("L"))
    """Number of token events of each such read."""
    num_events: int = 0
    first_s: float | None = None
    """Time of the first frame with text."""
    last_s: float = 0.0
    usage: ChunkUsage | None = None
    error: str | None = None
    done: bool = False
    """True if the stream ended with ``[DONE]``."""
    _buffer: bytearray = field(default_factory=lambda: bytearray(b"     \n"))
    _scanned: int = 6

    def feed(self, payload: bytes, now_s: float) -> None:
        """Process the next chunk of the body, received at ``now_s``."""
        buffer = self._buffer
        start = len(buffer) - 5
        buffer += payload
        if self.first_s is None:
            self._find_first(now_s)
            return
        num = buffer.count(_MARK, start)
        if num:
            self.num_events += num
            self.read_times_s.append(now_s)
            self.read_events.append(num)
            if len(buffer) > _TRIM_BYTES:
                del buffer[:-_KEEP_BYTES]

    def finish(self, now_s: float) -> None:
        """Finish a complete body: parse the last frames, and subtract those without text."""
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
        self._subtract(surplus)
        self._buffer = bytearray()

    def _find_first(self, now_s: float) -> None:
        """Decode complete frames up to the first one with text; count it and the rest of the buffer as token events."""
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

    def _subtract(self, surplus: int) -> None:
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
    """Return the end of the frame at ``start``, after its blank line; None if it is incomplete."""
    plain, carriage = buffer.find(b"\n\n", start), buffer.find(b"\r\n\r\n", start)
    if plain < 0 and carriage < 0:
        return None
    if carriage >= 0 and (plain < 0 or carriage < plain):
        return carriage + 4
    return plain + 2


def _content(frame: bytes) -> bytes:
    """Return the ``data:`` field of a frame; empty for comments."""
    for line in frame.splitlines():
        if line.startswith(b"data:"):
            return line[5:].strip()
    return b""


def _frames(body: bytes) -> list[bytes]:
    """Return the values of all ``data:`` lines."""
    return [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]


def _read_chunk(content: bytes) -> Chunk | None:
    try:
        return _decode_chunk(content)
    except msgspec.MsgspecError:
        return None
