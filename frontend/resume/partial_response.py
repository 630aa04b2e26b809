"""An answer that began at another server, which is lost: what is known of it, and how a stream goes on from there.

Whoever passed the answer on, such as `quintet route`, has its tokens beside its text. A request is its ids: with those that were
told it goes on at any server of the same model, and what was told is computed once more as a prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.frontend.streams import Stream

Told = tuple[Sequence[int], bool] | None
"""Of a choice: the tokens that were told, and whether its end was; None before its beginning was."""


@dataclass(frozen=True, slots=True)
class PartialResponse:
    """An answer's beginning."""

    position: str
    """Of its reader, as in the id of the last event."""
    outputs: Sequence[Sequence[int]]
    """Tokens of every choice, those of the first prompt first; at least as many as the position says."""
    seeds: Sequence[int]
    """Of each prompt."""
    created: int
    """Seconds since 1970."""
    name: str = ""
    """What the answer is called, where a server makes names up; else "" as the request says it."""


def go_on_behind(stream: Stream, told: Sequence[Told]) -> None:
    """Bring a stream that nobody has sent yet to where its reader is; one of which nothing was told elsewhere is there."""
    if not told:
        return
    for choice, known in zip(stream.choices, told, strict=True):
        ids, has_ended = known or ((), False)
        choice.go_on(ids, None if known is None else len(ids), has_ended)
    stream.num_open = sum(choice.finish is None for choice in stream.choices)
