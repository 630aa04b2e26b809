"""Partial response: output that a client received from a failed server, to continue the stream here.

A proxy such as `quintet route` keeps each choice's token ids. With them any server of the same model continues the
response; the ids received so far are prefilled with the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.frontend.streams import Stream

ReceivedOutput = tuple[Sequence[int], bool] | None
"""Token ids of a choice that the client received, and whether it received the end; None before the choice's first event."""


@dataclass(frozen=True, slots=True)
class PartialResponse:
    """The part of a response that the client received."""

    position: str
    """Reader's cursor, as in the id of the last event."""
    outputs: Sequence[Sequence[int]]
    """Token ids of every choice, in order of prompts; at least as many as the cursor counts."""
    seeds: Sequence[int]
    """One per prompt."""
    created: int
    """Unix time, in seconds."""
    name: str = ""
    """Response id, in APIs where the server makes one up; else ""."""


def apply_received(stream: Stream, received: Sequence[ReceivedOutput]) -> None:
    """Advance a stream that has not been sent to its reader's cursor. No-op without received output."""
    if not received:
        return
    for choice, known in zip(stream.choices, received, strict=True):
        ids, has_ended = known or ((), False)
        choice.skip_received(ids, None if known is None else len(ids), has_ended)
    stream.num_open = sum(choice.finish is None for choice in stream.choices)
