"""Resumption of a request that a core retained, under new ids."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from quintet.frontend.live_requests import LiveRequests
from quintet.frontend.streams import Mailbox, Received, Stream
from quintet.wire.codec import ID_BYTES
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import Admit, Resumed, Started, Submit, TokenPrompt


def resume_retained(
    requests: LiveRequests,
    resumed: Resumed,
    first_id: int,
    received: Sequence[Received],
    mailbox: Mailbox,
    interval: int,
) -> Stream:
    """Resume a request that the core retained, and return a stream of the output the client has not received.

    ``first_id`` comes from `LiveRequests.take_ids`; the core has the request under that id.
    """
    submit = _submit_of(resumed, first_id, received)
    stream = Stream(submit, mailbox, requests.cancel, interval=interval)
    stream.pinned_core = resumed.core
    stream.resume(received)
    if _has_started(received):
        assert resumed.admit is not None
        arrival_ns, num_prompt = submit.spec.arrival_ns, len(resumed.admit.prompt_ids) // ID_BYTES
        stream.started = Started(first_id, num_prompt, 0, arrival_ns, arrival_ns)
    if stream.num_open:
        requests.begin(stream)
        requests.metrics.resumed.inc()
    return stream


def _submit_of(resumed: Resumed, first_id: int, received: Sequence[Received]) -> Submit:
    """Return the submission of a request that a core retained, under ids from ``first_id``."""
    admit = resumed.admit
    assert admit is not None
    changes: dict[str, object] = {"n": len(received)}
    if _has_started(received):
        changes["prompt_logprobs"] = None  # sent with the start
    return Submit(
        request_id=first_id,
        prompt=_prompt_of(admit),
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


def _prompt_of(admit: Admit) -> TokenPrompt | EmbedsPrompt:
    """Return the prompt of an admitted request."""
    if not admit.embeds:
        return TokenPrompt(admit.prompt_ids)
    span = admit.embeds[0]
    assert span.end * 4 == len(admit.prompt_ids), "clients send embeddings for the whole prompt"
    return EmbedsPrompt(span.dtype, span.width, span.values)


def _has_started(received: Sequence[Received]) -> bool:
    """True if a client has the start of a response."""
    return any(ids is not None for ids, _ in received)
