"""Reattach a client to a request that the core retained: build its submission and stream."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from quintet.frontend.streams import Stream
from quintet.wire.codec import unpack_i32
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
        prompt=TokenPrompt(admit.prompt_ids) if admit.embeds is None else admit.embeds,
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
