"""Where in a streamed answer its client is: what the ids of events say.

    <first request id>-<key>:<choice>,<choice>,…[.note]

A choice is ``-`` (nothing was told), the number of its tokens that were told, or that number and ``e`` (its end was told
too). A note is a dialect's own: what else was told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import shown

_STREAM = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{32})")
_CHOICE = re.compile(r"-|[0-9]{1,9}e?")
MAX_CHOICES = 32
"""Streams of more have no ids: each event would name them all, and what a step writes would grow with their square."""
_NOTE = re.compile(r"[a-z0-9+]{1,32}")
MAX_CHARS = 16 * MAX_CHOICES + 33


@dataclass(frozen=True, slots=True)
class StreamId:
    """The request behind a stream, and the secret that lets its client go on with it."""

    request_id: int
    key: bytes

    @classmethod
    def parse(cls, text: str) -> StreamId:
        """Read an id. Raises `RequestError`."""
        match = _STREAM.fullmatch(text)
        if match is None:
            raise RequestError(
                ErrorCode.NOT_FOUND,
                f"The stream is {shown(text)}; it must be as an event's `id:` or the header X-Stream-Id named it.",
                "stream",
            )
        return cls(int(match[1], 16), bytes.fromhex(match[2]))

    def __str__(self) -> str:
        return f"{self.request_id:x}-{self.key.hex()}"


class StreamCursor:
    """How much of each choice was told. Belongs to one `AnswerWriter`."""

    __slots__ = ("counts", "ended", "note")

    def __init__(self, num_choices: int) -> None:
        self.counts: list[int | None] = [None] * num_choices
        """Tokens told of each choice; None before anything was."""
        self.ended = [False] * num_choices
        self.note = ""
        """Of the dialect: what else was told."""

    @classmethod
    def parse(cls, text: str, num_choices: int) -> StreamCursor:
        """Read what `__str__` wrote; ``0`` alone and nothing at all mean the beginning. Raises `RequestError`."""
        position = cls(num_choices)
        if text in ("", "0"):
            return position
        told, dot, note = text.partition(".") if len(text) <= MAX_CHARS else ("", "", "")
        choices = told.split(",")
        is_note = not dot or _NOTE.fullmatch(note)
        if len(choices) != num_choices or not all(map(_CHOICE.fullmatch, choices)) or not is_note:
            raise RequestError(
                ErrorCode.INVALID,
                f"The position is {shown(text)}; it must be what follows the colon in the `id:` of an event of this stream, "
                "or 0 for its beginning.",
                "from",
            )
        position.note = note
        for index, choice in enumerate(choices):
            if choice != "-":
                position.counts[index] = int(choice.removesuffix("e"))
                position.ended[index] = choice.endswith("e")
        return position

    def __str__(self) -> str:
        choices = [
            "-" if count is None else f"{count}e" if ended else str(count)
            for count, ended in zip(self.counts, self.ended, strict=True)
        ]
        return ",".join(choices) + (f".{self.note}" if self.note else "")
