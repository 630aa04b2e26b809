"""What a parser makes of text, and what every parser promises."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from quintet.wire.channels import Channel


class ChannelText(NamedTuple):
    """Some text of one channel. Texts are never empty; a name comes whole, before its call's arguments."""

    channel: Channel
    call: int
    """Number of the call, from 0; 0 for other channels."""
    text: str


class Parser(Protocol):
    """Reads one output as it comes.

    What has been told after some text depends on that text alone, not on how it was cut. Nothing raises, and no text is
    lost: what looks like a call and is none is content. Markup of a call that the end of the output cuts off is left out.
    """

    @property
    def is_reasoning(self) -> bool:
        """Whether the text read last belongs to the reasoning."""

    def push(self, text: str) -> list[ChannelText]:
        """Read on; return what has become certain."""

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        """End the text; return what was held back. ``is_cut``: a limit ended the output, not the model."""


def joined(pieces: Iterable[ChannelText]) -> list[ChannelText]:
    """Return the pieces with neighbours of one channel and call made one."""
    found: list[ChannelText] = []
    for piece in pieces:
        if found and found[-1][:2] == piece[:2] and piece.channel is not Channel.NAME:
            found[-1] = ChannelText(piece.channel, piece.call, found[-1].text + piece.text)
        else:
            found.append(piece)
    return found
