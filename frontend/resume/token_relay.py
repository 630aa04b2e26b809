"""Streams that somebody passes on to clients, and goes on with at another server should this one be lost.

The header ``X-Quintet-Relay`` of a request asks for what that takes: the tokens beside the text, in comments before the events
that tell them (``: ids <choice> [<token>,…]``), and a header of the same name in the response. With both, `go_on.py` goes on. Who
comes back for a stream, and asks for that, is told those of the events that it has before the first of the rest, by another word
(``: told <choice> [<token>,…]``), since it may know them already: they take the place of what it knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from quintet.frontend.api.answer import Submissions
from quintet.frontend.api.openai import parse
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.resume.partial_response import PartialResponse, Told
from quintet.frontend.resume.stream_cursor import StreamCursor, StreamId

RELAY_HEADER = "x-quintet-relay"
TOLD_AT_ONCE = 1 << 15
"""Tokens in a comment: nobody holds what is longer than an event may be."""
WITHDRAWN = b": withdrawn\n"
"""Before an event that ends a stream with an error, and has no status: another server can go on."""
_encode = msgspec.json.Encoder().encode


class RelayedWriter(Protocol):
    """Writes the events of a stream that somebody may pass on."""

    stream_id: StreamId | None
    tells_ids: bool
    """Whether comments before the events tell their tokens."""
    foretold: list[bytes]
    """Such comments, of tokens that were told before this writer's first event."""
    created: int | None
    """When the answer began, in seconds since 1970; None where its events do not say."""
    name: str
    """What the answer is called, where the request does not say; else empty."""
    can_go_on: bool
    """Whether its tokens are enough for another server to go on."""


WriterT = TypeVar("WriterT", bound=RelayedWriter)


def ids_comment(index: int, token_ids: Sequence[int]) -> bytes:
    """Return the comment that tells whoever passes a stream on more tokens of a choice."""
    return b": ids %d %b\n" % (index, _encode(list(token_ids)))


def told_comments(index: int, token_ids: Sequence[int]) -> list[bytes]:
    """Return the comments that tell all tokens of a choice that were told before, whatever is known of them, each for itself."""
    pieces = [token_ids[first : first + TOLD_AT_ONCE] for first in range(0, len(token_ids), TOLD_AT_ONCE)]
    first = b": told %d %b\n\n" % (index, _encode(list(pieces[0]) if pieces else []))
    return [first, *(ids_comment(index, piece) + b"\n" for piece in pieces[1:])]


def relaying(
    exchange: HttpRequest,
    writer: WriterT,
    submissions: Submissions,
    told: Iterable[tuple[int, Sequence[int]]] = (),
) -> WriterT:
    """Have the events tell their tokens, and the response its ticket, if the client asks and can come back for the stream.

    The ticket is the seed of each prompt, when the answer began, and its name, if the request does not say that.
    told: choices and their tokens that an earlier connection was told. Who asks for the rest may know them or not.
    """
    if exchange.header(RELAY_HEADER) is not None and writer.stream_id is not None and writer.can_go_on:
        writer.tells_ids = True
        writer.foretold = [note for index, ids in told for note in told_comments(index, ids)]
        seeds = ",".join(str(stream.submit.spec.params.seed) for stream in submissions.streams)
        name = f".{writer.name}" if writer.name else ""
        ticket = f"{seeds}.{writer.created or 0}{name}"
        exchange.headers_out.append((RELAY_HEADER.encode(), ticket.encode()))
    return writer


def behind(
    begun: PartialResponse | None, n: int, num_prompts: int
) -> tuple[Sequence[int], StreamCursor | None, list[list[Told]]]:
    """Return with what a request of ``n`` choices goes on: each prompt's seed, where its reader is, what was told of its choices.

    Nothing of a request that begins here. Raises `RequestError`.
    """
    if begun is None:
        return (), None, []
    if len(begun.seeds) != num_prompts:
        raise parse.invalid(
            f"seeds has {len(begun.seeds)} numbers; the request has {num_prompts} prompts: send the seed of each.",
            "seeds",
        )
    position = StreamCursor.parse(begun.position, num_prompts * n)
    if len(begun.outputs) != num_prompts * n:
        raise parse.invalid(
            f"outputs has {len(begun.outputs)} lists; the request has {num_prompts * n} choices: send the tokens of each.",
            "outputs",
        )
    told = [
        _told(ids, count, ended, index)
        for index, (ids, count, ended) in enumerate(
            zip(begun.outputs, position.counts, position.ended, strict=True)
        )
    ]
    by_prompt = [told[first : first + n] for first in range(0, len(told), n)]
    return begun.seeds, position, by_prompt


def _told(ids: Sequence[int], count: int | None, has_ended: bool, index: int) -> Told:
    if count is None:
        return None
    if count > len(ids):
        raise parse.invalid(
            f"outputs has {len(ids)} tokens of choice {index}, of which {count} were told by the position: send all of them.",
            "outputs",
        )
    return ids[:count], has_ended
