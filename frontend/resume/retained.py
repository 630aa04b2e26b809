"""Resumption of a request that a core retained, under new ids."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from quintet.frontend.live_requests import LiveRequests
from quintet.frontend.streams import Mailbox, Received, Stream
from quintet.wire.codec import ID_BYTES
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import Resumed, Started, Submit, TokenPrompt


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
    admit, arrival_ns = resumed.admit, time.monotonic_ns()
    assert admit is not None
    prompt: TokenPrompt | EmbedsPrompt = TokenPrompt(admit.prompt_ids)
    if admit.embeds:
        span = admit.embeds[0]
        assert span.end * ID_BYTES == len(admit.prompt_ids), "clients send embeddings for the whole prompt"
        prompt = EmbedsPrompt(span.dtype, span.width, span.values)
    has_started = any(ids is not None for ids, _ in received)
    changes: dict[str, object] = {"n": len(received)}
    if has_started:
        changes["prompt_logprobs"] = None  # sent with the start
    spec = msgspec.structs.replace(
        admit.spec,
        params=msgspec.structs.replace(admit.spec.params, **changes),
        arrival_ns=arrival_ns,
        choice=0,
        output_ids=b"",
        attempt=0,
    )
    # The limit was accepted when the request arrived.
    submit = Submit(first_id, prompt, spec, sent_ns=0, core=0, clamp_max_tokens=True)
    stream = Stream(submit, mailbox, requests.cancel, interval)
    stream.pinned_core = resumed.core
    stream.resume(received)
    if has_started:
        num_prompt = len(admit.prompt_ids) // ID_BYTES
        stream.started = Started(first_id, num_prompt, 0, arrival_ns, arrival_ns)
    if stream.num_open:
        requests.begin(stream)
        requests.metrics.resumed.inc()
    return stream
