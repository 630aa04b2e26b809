"""Channels of output text: content, reasoning, tool call names and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec


class Channel(IntEnum):
    """Channel of a span of text."""

    CONTENT = 0
    REASONING = 1
    NAME = 2
    """The name of a tool call, whole."""
    ARGUMENTS = 3
    """A part of a tool call's arguments, which are JSON."""


def is_inside(prompt: str, opens: Sequence[str], closes: Sequence[str], otherwise: bool) -> bool:
    """Return True when output after this prompt starts in reasoning: its last text is an opening mark, or ``otherwise``."""
    prompt = prompt.rstrip()
    if prompt.endswith(tuple(opens)):
        return True
    return otherwise and not prompt.endswith(tuple(closes))


TextSpan = tuple[int, int, int]
"""Channel, index of the tool call (0 otherwise), characters."""


class RowSpans(msgspec.Struct, array_like=True, gc=False):
    """Inside `Text`: the channels of one row's delta, in order and complete."""

    row: int
    spans: list[TextSpan]
