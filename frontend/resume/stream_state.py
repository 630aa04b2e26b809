"""State with which a stream is resumed: id, cursor and resume token.

The cursor is the client's position, as in event ids.

    <first request id>-<key>:<choice>,<choice>,…[.note]

A choice is ``-`` (nothing sent), the number of its tokens sent, or that number and ``e`` (end sent). A note is
API-specific.

The resume token has a secret and the response shape. It is sent with a streamed request, so that any frontend can
resume it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

import msgspec

from quintet.frontend.api import sse
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.params import shown
from quintet.wire.request import ResumeToken

_STREAM = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{32})")
_CHOICE = re.compile(r"-|[0-9]{1,9}e?")
LAST_EVENT = "last-event-id"
"""Header of a repeated request: id of the last event that its client has."""
MAX_CHOICES = 32
"""Streams with more choices have no ids: each event would list all choices, so bytes per step would grow quadratically."""
_NOTE = re.compile(r"[a-z0-9+]{1,32}")
MAX_CHARS = 16 * MAX_CHOICES + 33


@dataclass(frozen=True, slots=True)
class StreamId:
    """Request of a stream, and the secret that authorizes resuming it."""

    request_id: int
    key: bytes

    @classmethod
    def parse(cls, text: str) -> StreamId:
        """Parse an id. Raises `RequestError`."""
        match = _STREAM.fullmatch(text)
        if match is None:
            raise RequestError(
                ErrorCode.NOT_FOUND,
                f"The stream is {shown(text)}; send the stream id of an event's `id:` or of the header X-Stream-Id.",
                "stream",
            )
        return cls(int(match[1], 16), bytes.fromhex(match[2]))

    def __str__(self) -> str:
        return f"{self.request_id:x}-{self.key.hex()}"


class StreamCursor:
    """Position in each choice. Owned by one `AnswerWriter`."""

    __slots__ = ("counts", "ended", "note")

    def __init__(self, num_choices: int) -> None:
        self.counts: list[int | None] = [None] * num_choices
        """Tokens sent of each choice; None before the first event."""
        self.ended = [False] * num_choices
        self.note = ""
        """API-specific state."""

    @classmethod
    def parse(cls, text: str, num_choices: int) -> StreamCursor:
        """Parse the text of `__str__`; ``0`` or empty is the start. Raises `RequestError`."""
        position = cls(num_choices)
        if text in ("", "0"):
            return position
        counts_text, dot, note = text.partition(".") if len(text) <= MAX_CHARS else ("", "", "")
        choices = counts_text.split(",")
        is_note = not dot or _NOTE.fullmatch(note)
        if len(choices) != num_choices or not all(map(_CHOICE.fullmatch, choices)) or not is_note:
            raise invalid(
                f"The position is {shown(text)}; send the part after the colon of an event's `id:` of this stream, "
                "or 0 for the start.",
                "from",
            )
        position.note = note
        for index, choice in enumerate(choices):
            if choice != "-":
                position.counts[index] = int(choice.removesuffix("e"))
                position.ended[index] = choice.endswith("e")
        return position

    def read_note(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Parse the note; None without one. Raises `RequestError` for a note of another API."""
        match = pattern.fullmatch(self.note)
        if self.note and match is None:
            raise invalid(
                f"The position ends with {shown(self.note)}; send the id of the last event that was received.",
                "from",
            )
        return match

    def __str__(self) -> str:
        choices = [
            "-" if count is None else f"{count}e" if ended else str(count)
            for count, ended in zip(self.counts, self.ended, strict=True)
        ]
        return ",".join(choices) + (f".{self.note}" if self.note else "")


@dataclass(slots=True, eq=False)
class StreamState:
    """Id and cursor of a stream that is written, and what a proxy needs to resume it elsewhere. Owned by its writer."""

    stream_id: StreamId | None
    """None without event ids."""
    cursor: StreamCursor
    created: int | None = None
    """Unix time of the response's start, in seconds; None where the events do not have it."""
    name: str = ""
    """Response id, where the server makes one up; else ""."""
    is_relayable: bool = True
    """True if token ids are enough for another server to resume it."""
    sends_ids: bool = False
    """True if a comment with token ids precedes each event."""
    prior_comments: list[bytes] = field(default_factory=list)
    """Such comments for tokens sent before the writer's first event."""

    @property
    def event_id(self) -> bytes:
        """Field of an event id up to the cursor; empty without ids."""
        return b"" if self.stream_id is None else b"id: %b:" % str(self.stream_id).encode()

    def take_comments(self) -> list[bytes]:
        """Return the comments before the first event, and forget them."""
        comments, self.prior_comments = self.prior_comments, []
        return comments

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        if self.stream_id is None:
            return sse.HEADERS
        return (*sse.HEADERS, (b"x-stream-id", str(self.stream_id).encode()))


KEY_BYTES = 16


class Answer(msgspec.Struct, array_like=True):
    """Content of `ResumeToken.answer`: event format of a stream. Each API extends it (`endpoints.RESUMABLE_APIS`)."""

    num_prompts: int
    """Prompts of the HTTP request. Their ids are consecutive, ``num_choices`` for each."""
    num_choices: int
    """Per prompt."""
    interval: int
    """Tokens per event."""


def resume_token_for(answer: Answer, config: EngineConfig) -> ResumeToken | None:
    """Build the resume token; None if resuming is disabled or there are too many choices."""
    if config.scheduler.resume_grace_s <= 0 or answer.num_prompts * answer.num_choices > MAX_CHOICES:
        return None
    return ResumeToken(secrets.token_bytes(KEY_BYTES), msgspec.msgpack.encode(answer))
