"""Token ids in streams for a proxy, which continues them at another server if this one fails.

A request header ``X-Quintet-Relay`` asks for token ids: a comment before each event (``: ids <choice> [<token>,…]``),
and a response header of the same name. With both, POST /v1/streams resumes the response on another server. A resumed
stream first gets the ids of earlier events in another comment (``: told <choice> [<token>,…]``), which replaces those
the proxy has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from quintet.frontend.resume.stream_state import StreamCursor, StreamState
from quintet.frontend.streams import Received, Stream
from quintet.wire.errors import invalid

RELAY_HEADER = "x-quintet-relay"
MAX_COMMENT_TOKENS = 1 << 15
"""Tokens per comment, to stay below the maximum size of an event."""
WITHDRAWN = b": withdrawn\n"
"""Comment before an error event without a status: another server can continue the stream."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PartialResponse:
    """Part of a response that a client received from another server, which failed.

    A proxy such as `quintet route` keeps each choice's token ids. With them any server of the same model resumes the response;
    the ids are prefilled with the prompt.
    """

    position: str
    """Client's cursor, as in the id of the last event."""
    outputs: Sequence[Sequence[int]]
    """Token ids of every choice, in order of prompts; at least as many as the cursor counts."""
    seeds: Sequence[int]
    """One per prompt."""
    created: int
    """Unix time, in seconds."""
    name: str = ""
    """Response id, in APIs where the server makes one up; else ""."""


def ids_comment(index: int, token_ids: Sequence[int]) -> bytes:
    """Return the comment with further token ids of a choice."""
    return b": ids %d %b\n" % (index, _encode(list(token_ids)))


def replayed_comments(index: int, token_ids: Sequence[int]) -> list[bytes]:
    """Return the comments with all token ids of a choice before the cursor, split by `MAX_COMMENT_TOKENS`."""
    pieces = [
        token_ids[first : first + MAX_COMMENT_TOKENS]
        for first in range(0, len(token_ids), MAX_COMMENT_TOKENS)
    ]
    first = b": told %d %b\n\n" % (index, _encode(list(pieces[0]) if pieces else []))
    return [first, *(ids_comment(index, piece) + b"\n" for piece in pieces[1:])]


def enable_relay(
    headers_out: list[tuple[bytes, bytes]],
    state: StreamState,
    streams: Sequence[Stream],
    received: Iterable[tuple[int, Sequence[int]]],
) -> None:
    """Enable token id comments and the relay header, if the stream is resumable. For requests with `RELAY_HEADER`.

    The header has the seed of each prompt, the start time, and the response id if the server made it up.
    ``received``: choices and their token ids before the cursor.
    """
    if state.stream_id is None or not state.is_relayable:
        return
    state.sends_ids = True
    state.prior_comments = [note for index, ids in received for note in replayed_comments(index, ids)]
    seeds = ",".join(str(stream.submit.spec.params.seed) for stream in streams)
    name = f".{state.name}" if state.name else ""
    ticket = f"{seeds}.{state.created or 0}{name}"
    headers_out.append((RELAY_HEADER.encode(), ticket.encode()))


def resume_state(
    partial: PartialResponse, n: int, num_prompts: int
) -> tuple[Sequence[int], StreamCursor, list[list[Received]]]:
    """Return each prompt's seed, the cursor, and the received output of each prompt's ``n`` choices. Raises `RequestError`."""
    if len(partial.seeds) != num_prompts:
        raise invalid(
            f"seeds has {len(partial.seeds)} numbers for {num_prompts} prompts; send one seed per prompt.",
            "seeds",
        )
    position = StreamCursor.parse(partial.position, num_prompts * n)
    if len(partial.outputs) != num_prompts * n:
        raise invalid(
            f"outputs has {len(partial.outputs)} lists for {num_prompts * n} choices; send one list per choice.",
            "outputs",
        )
    received = [
        _received(ids, count, ended, index)
        for index, (ids, count, ended) in enumerate(
            zip(partial.outputs, position.counts, position.ended, strict=True)
        )
    ]
    by_prompt = [received[first : first + n] for first in range(0, len(received), n)]
    return partial.seeds, position, by_prompt


def _received(ids: Sequence[int], count: int | None, has_ended: bool, index: int) -> Received:
    if count is None:
        return None, False
    if count > len(ids):
        raise invalid(
            f"outputs has {len(ids)} tokens of choice {index}, but the position counts {count}; send all of them.",
            "outputs",
        )
    return ids[:count], has_ended
