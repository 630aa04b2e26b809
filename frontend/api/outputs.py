"""Outputs of unstreamed responses, from which every API builds its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.frontend.api.answer import Submissions, explain
from quintet.frontend.http.http_request import ClientDisconnected, HttpRequest
from quintet.frontend.streams import Stream
from quintet.wire.channels import TextSpan
from quintet.wire.messages import Finish, PositionLogprobs


@dataclass(slots=True)
class Output:
    """One choice of an unstreamed response."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[PositionLogprobs]
    finish: Finish
    stream: Stream
    spans: Sequence[TextSpan]
    """Spans of the text: see `quintet.frontend.streams.text_spans`."""


async def collect_outputs(http_request: HttpRequest, submissions: Submissions) -> list[Output]:
    """Wait for the end of every stream and return the choices in order of prompts.

    Raises the first stream's error, or `ClientDisconnected`; both cancel the other streams.
    """
    bases: dict[int, int] = {}
    num_choices = 0
    for stream in submissions.streams:
        bases[stream.request_id] = num_choices
        num_choices += len(stream.choices)
    outputs: dict[int, Output] = {}
    watcher = http_request.watch_disconnect(submissions.disconnect)
    try:
        while submissions.num_unread:
            ready = await submissions.mailbox.wait()
            if submissions.client_gone:
                raise ClientDisconnected
            for stream in ready:
                batch = submissions.take(stream)
                if batch.error is not None:
                    raise batch.error
                for delta in batch.deltas:
                    index = bases[stream.request_id] + delta.choice
                    assert delta.finish is not None, f"choice {index} delivered before its end"
                    outputs[index] = Output(
                        index, delta.text, delta.token_ids, delta.logprobs, delta.finish, stream, delta.spans
                    )
    finally:
        watcher.cancel()
        submissions.close()
    explain(http_request, submissions.streams)
    return [outputs[index] for index in sorted(outputs)]
