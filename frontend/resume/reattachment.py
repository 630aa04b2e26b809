"""Reattach a client to a request that the core retained, or to the output received from a failed server.

`PartialResponse` is output that a client received from a failed server, to continue the stream here. A proxy such as
`quintet route` keeps each choice's token ids. With them any server of the same model continues the response; the ids
received so far are prefilled with the prompt.

A request that the engine lost is a server fault.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quintet.frontend.streams import Stream, StreamChoice
from quintet.wire.codec import unpack_i32
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Admit, Reclaimed, Started, Submit, TokenPrompt

ReceivedCount = tuple[int | None, bool]
"""Number of a choice's tokens that the client has (None: not even the start), and whether it has the end."""


def submission(admit: Admit, first_id: int, received: Sequence[ReceivedCount]) -> Submit:
    """Return the submission that resumes a request under ids from ``first_id``."""
    changes: dict[str, object] = {"n": len(received)}
    if _was_started(received):
        changes["prompt_logprobs"] = None  # sent with the start
    return Submit(
        request_id=first_id,
        prompt=prompt_of(admit),
        spec=msgspec.structs.replace(
            admit.spec,
            params=msgspec.structs.replace(admit.spec.params, **changes),
            arrival_ns=time.monotonic_ns(),
            choice=0,
            output_ids=b"",
            attempt=0,
        ),
        sent_ns=0,
        core=0,
        clamp_max_tokens=True,  # the limit was accepted when the request arrived
    )


def prompt_of(admit: Admit) -> TokenPrompt | EmbedsPrompt:
    """Return the prompt of an admitted request."""
    if not admit.embeds:
        return TokenPrompt(admit.prompt_ids)
    span = admit.embeds[0]
    assert span.end * 4 == len(admit.prompt_ids), "clients send embeddings for the whole prompt"
    return EmbedsPrompt(span.dtype, span.width, span.values)


def skip_received(stream: Stream, reclaimed: Reclaimed, received: Sequence[ReceivedCount]) -> None:
    """Advance a new stream to its client's cursor."""
    submit, outputs = stream.submit, dict(reclaimed.choices)
    for choice, (count, has_ended) in zip(stream.choices, received, strict=True):
        choice.skip_received(unpack_i32(outputs.get(choice.index, b"")), count, has_ended)
    stream.num_open = sum(choice.finish is None for choice in stream.choices)
    if _was_started(received) and reclaimed.admit is not None:
        num_prompt_tokens = len(reclaimed.admit.prompt_ids) // 4
        arrival_ns = submit.spec.arrival_ns
        stream.started = Started(submit.request_id, num_prompt_tokens, 0, arrival_ns, arrival_ns)


def _was_started(received: Sequence[ReceivedCount]) -> bool:
    return any(count is not None for count, _ in received)


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


MAX_RESENDS = 3
"""Maximum resends of a request that the engine does not know."""


def unknown_request_error() -> RequestError:
    """Build the error for a request that the engine still does not know after `MAX_RESENDS` resends."""
    return RequestError(
        ErrorCode.INTERNAL,
        f"The request was lost inside the server {MAX_RESENDS + 1} times and is aborted. This is a server fault: "
        "report it with the server's log.",
    )


def missing_output_error(choice: StreamChoice, first_index: int, offset: int) -> RequestError:
    """Build the error for output that does not follow the output received so far."""
    return RequestError(
        ErrorCode.INTERNAL,
        f"Output of choice {choice.index} was lost inside the server: received token {first_index} at character "
        f"{offset} after {len(choice.output_ids)} tokens and {choice.num_chars} characters.",
    )
