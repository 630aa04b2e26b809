"""Output type and interface of parsers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from quintet.wire.channels import Channel

MAX_NAME = 256
"""Characters of a function's or parameter's name; a longer name is invalid, which bounds the text held back."""


class ChannelText(NamedTuple):
    """Text of one channel, never empty. A name is emitted whole, before its call's arguments."""

    channel: Channel
    call: int
    """Number of the call, from 0; 0 for other channels."""
    text: str


class Parser(Protocol):
    """Incremental parser of one output.

    The emitted text depends only on the text read, not on its chunking. Parsers do not raise and lose no text: an
    invalid call is content. Markup of a call that the end of the output truncates is dropped.
    """

    @property
    def is_reasoning(self) -> bool:
        """True if the last text belongs to the reasoning."""

    def push(self, text: str) -> list[ChannelText]:
        """Read text; return the parsed deltas that are final."""

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        """End the text; return the deltas held back. ``is_cut``: a limit ended the output, not the model."""


def joined(deltas: Iterable[ChannelText]) -> list[ChannelText]:
    """Merge adjacent deltas of the same channel and call."""
    found: list[tuple[Channel, int, list[str]]] = []
    for channel, call, text in deltas:
        if found and found[-1][:2] == (channel, call) and channel is not Channel.NAME:
            found[-1][2].append(text)
        else:
            found.append((channel, call, [text]))
    return [ChannelText(channel, call, "".join(texts)) for channel, call, texts in found]
