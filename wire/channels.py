"""The channels of an answer: what kind of text a piece of output is."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec


class Channel(IntEnum):
    """What a span of an answer's text is."""

    CONTENT = 0
    REASONING = 1
    NAME = 2
    """The name of a call, whole."""
    ARGUMENTS = 3
    """A part of a call's arguments, which are JSON."""


def is_inside(prompt: str, opens: Sequence[str], closes: Sequence[str], otherwise: bool) -> bool:
    """Whether an output behind this prompt begins with reasoning: the prompt's last word is a mark, or ``otherwise``."""
    prompt = prompt.rstrip()
    if prompt.endswith(tuple(opens)):
        return True
    return otherwise and not prompt.endswith(tuple(closes))


Span = tuple[int, int, int]
"""Channel, number of the call (0 elsewhere), characters."""


class RowSpans(msgspec.Struct, array_like=True, gc=False):
    """Inside `Text`: what the delta of one row is made of, from its first character to its last."""

    row: int
    spans: list[Span]
