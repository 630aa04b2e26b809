"""The events of one stream on their way through: whole ones only, without what the server told the router in comments.

From those comments, and the id of the last event, follows what another server needs to go on
(`frontend/dialects/openai/relay.py`).
"""

from __future__ import annotations

import json
import re

_IDS = re.compile(rb"^: ids (\d+) (\[[\d,]*\])\n", re.MULTILINE)
_EVENT_ID = re.compile(rb"^id: ([^\n:]+):([^\n]*)$", re.MULTILINE)
DONE = b"data: [DONE]\n\n"
_ENDS = (
    b"event: message_stop\n",
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: response.failed\n",
)


class Events:
    """One stream."""

    def __init__(self) -> None:
        self._rest = b""
        """The beginning of an event that has not come whole."""
        self._notes: list[tuple[bytes, bytes]] = []
        """Number of a choice, and tokens of it, as the server wrote them."""
        self._outputs: list[list[int]] = []
        """What was known when a server went on."""
        self._last = b""
        """The newest piece that had the id of an event."""
        self.is_over = False
        """Whether its end was told."""

    def take(self, piece: bytes) -> bytes:
        """Return the events that are whole now, for the client."""
        if self._rest:
            piece, self._rest = self._rest + piece, b""
        if not piece.endswith(b"\n\n"):
            end = piece.rfind(b"\n\n") + 2 if b"\n\n" in piece else 0
            if not _are_comments(piece[end:]):
                piece, self._rest = piece[:end], piece[end:]
        if b": ids " in piece:
            self._notes += _IDS.findall(piece)
            piece = _IDS.sub(b"", piece)
        if b"id: " in piece:
            self._last = piece
        if piece.endswith(DONE) or any(end in piece for end in _ENDS):
            self.is_over = True
        return piece

    def begin_again(self) -> tuple[str, str, list[list[int]]] | None:
        """A server is lost: return the name of the stream there, where its reader is, and the tokens of every choice.

        None where the events say none of that. What comes next is of the server that goes on from there.
        """
        found = _EVENT_ID.findall(self._last)
        self._rest = b""
        if not found:
            return None
        name, position = (word.decode("ascii", "replace") for word in found[-1])
        counts = [_count(word) for word in position.partition(".")[0].split(",")]
        outputs = self._outputs or [[] for _ in counts]
        for choice, ids in self._notes:
            if int(choice) < len(outputs):
                outputs[int(choice)] += json.loads(ids)
        self._notes.clear()
        self._outputs = [ids[:count] for ids, count in zip(outputs, counts, strict=False)]
        return name, position, [list(ids) for ids in self._outputs]


def _are_comments(lines: bytes) -> bool:
    """Whether this is nothing but whole comments, which need not wait for an event."""
    return lines.endswith(b"\n") and all(line.startswith(b":") for line in lines.splitlines())


def _count(word: str) -> int:
    digits = word.removesuffix("e")
    return int(digits) if digits.isdigit() else 0
