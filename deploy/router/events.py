"""Event filter of one stream: passes complete events and removes the server's comments for the router.

The comments and the last event's id have the state with which another server can resume the stream
(`frontend/resume/token_relay.py`).
"""

from __future__ import annotations

import json
import re

from quintet.frontend.api import sse
from quintet.frontend.api.anthropic.errors import OVERLOADED
from quintet.frontend.http.error_shape import STATUS
from quintet.wire.errors import ErrorCode

_NOTE = re.compile(rb"^: ((?:ids|told) \d+ \[(?:\d+(?:,\d+)*)?\])\r?\n", re.MULTILINE)
_WITHDRAWN = re.compile(rb"^: withdrawn\r?\n", re.MULTILINE)
_EVENT_ID = re.compile(rb"^id: ([^\r\n:]+):([^\r\n]*)", re.MULTILINE)
_ID_LINE = re.compile(rb"^id: [^\r\n]*\r?\n", re.MULTILINE)
_KEEP_ALIVE = re.compile(rb"^%b(?!\n)" % sse.KEEP_ALIVE_WITH_IDS, re.MULTILINE)
_ERROR = re.compile(rb'^(?:event: error\r?\n)?data: (\{(?:"type":"error",)?"error":[^\r\n]*)', re.MULTILINE)
DONE = b"data: [DONE]"
UNAVAILABLE = str(STATUS[ErrorCode.UNAVAILABLE])
_BLANKS = (b"\n\n", b"\r\n\r\n", b"\r\r")
"""Separators of events, for all line endings."""
_ENDS = tuple(
    b"event: %b%b" % (name, end)
    for name in (b"message_stop", b"response.completed", b"response.incomplete", b"response.failed", b"error")
    for end in (b"\n", b"\r")
)
MAX_EVENT_BYTES = 1 << 20
"""Maximum buffered size of an incomplete event; a larger one is forwarded in parts."""


class Events:
    def __init__(self, is_relayed: bool, sends_ids: bool = True) -> None:
        """``is_relayed``: another server can resume the stream, so an unavailable error is not sent to the client.

        ``sends_ids``: the client gets the ids of a relayed stream.
        """
        self._is_relayed, self._sends_ids = is_relayed, sends_ids
        self._rest = b""
        """Beginning of an incomplete event."""
        self._is_torn = False
        """True if the client has a part of an event; then the stream cannot be resumed."""
        self._notes = bytearray()
        """Server comments, one a line: kind (``ids``: more tokens, ``told``: all tokens), choice, token ids."""
        self._outputs: list[list[int]] = []
        """Output tokens per choice at the last resumption."""
        self._last = b""
        """Newest chunk with an event id."""
        self.has_started = False
        """True once an event, not only comments, was returned."""
        self.is_over = False
        """True once the stream's last event was returned."""
        self.is_withdrawn = False
        """True if the server reported that it cannot continue the stream. The report is not sent to the client."""

    def take(self, chunk: bytes) -> bytes:
        """Add received bytes; return the complete events for the client."""
        if self._rest:
            chunk, self._rest = self._rest + chunk, b""
        if not chunk.endswith(_BLANKS):
            end = max(chunk.rfind(blank) + len(blank) if blank in chunk else 0 for blank in _BLANKS)
            if len(chunk) - end > MAX_EVENT_BYTES:
                self._is_torn = True
            elif not _are_comments(chunk[end:]):
                chunk, self._rest = chunk[:end], chunk[end:]
        return self._filtered(chunk)

    def flush(self) -> bytes:
        """Return the rest of a stream that has ended."""
        chunk, self._rest = self._rest, b""
        return self._filtered(chunk)

    def _filtered(self, chunk: bytes) -> bytes:
        if self._is_relayed and b'"error":' in chunk:
            chunk = self._without_withdrawal(chunk)
        if self._is_relayed and b": withdrawn" in chunk and (found := _WITHDRAWN.search(chunk)):
            self.is_withdrawn = True
            chunk = chunk[: found.start()]
        if b": ids " in chunk or b": told " in chunk:
            for note in _NOTE.findall(chunk):
                self._notes += note + b"\n"
            chunk = _NOTE.sub(b"", chunk)
        if b"id: " in chunk:
            self._last = chunk
            if self._is_relayed and not self._sends_ids:
                chunk = _ID_LINE.sub(b"", chunk)
        if self._is_relayed and not self._sends_ids and sse.KEEP_ALIVE_WITH_IDS in chunk:
            chunk = _KEEP_ALIVE.sub(sse.KEEP_ALIVE, chunk)
        if not self.has_started:
            self.has_started = not _is_silence(chunk)
        if chunk.rstrip(b"\r\n").endswith(DONE) or (
            b"event: " in chunk and any(end in chunk for end in _ENDS)
        ):
            self.is_over = True
        return chunk

    def _without_withdrawal(self, chunk: bytes) -> bytes:
        """Return the text before an unavailable error, which makes the router use another server."""
        for found in _ERROR.finditer(chunk):
            try:
                error = json.loads(found[1])["error"]
                is_unavailable = str(error.get("code")) == UNAVAILABLE or error.get("type") == OVERLOADED
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            if is_unavailable:
                self.is_withdrawn = True
                return chunk[: found.start()]
        return chunk

    def take_resume_state(self) -> tuple[str, str, list[list[int]] | None] | None:
        """Return the resume state after a server was lost: stream name, cursor, and output tokens per choice.

        The tokens are None if not all are known, for example after the client reconnected. The result is None if the
        events had no id. Later chunks come from the server that resumes the stream.
        """
        found = _EVENT_ID.findall(self._last)
        self._rest, self.is_withdrawn = b"", False
        if not found or self._is_torn:
            return None
        name, position = (word.decode("ascii", "replace") for word in found[-1])
        counts = [_count(word) for word in position.partition(".")[0].split(",")]
        outputs = self._outputs or [[] for _ in counts]
        for note in self._notes.splitlines():
            word, choice, ids = note.split(b" ")
            if int(choice) < len(outputs):
                known = outputs[int(choice)] if word == b"ids" else []
                outputs[int(choice)] = known + json.loads(ids)
        self._notes.clear()
        self._outputs = [ids[:count] for ids, count in zip(outputs, counts, strict=False)]
        if [len(ids) for ids in self._outputs] != counts:
            return name, position, None
        return name, position, [list(ids) for ids in self._outputs]


def _are_comments(lines: bytes) -> bool:
    """Return whether the text has only complete comment lines."""
    return lines.endswith(b"\n") and all(line.startswith(b":") for line in lines.splitlines())


def _is_silence(lines: bytes) -> bool:
    lines = lines.replace(sse.KEEP_ALIVE_EVENT, b"")
    return all(line.startswith(b":") for line in lines.splitlines() if line)


def _count(word: str) -> int:
    digits = word.removesuffix("e")
    return int(digits) if digits.isdigit() else 0
