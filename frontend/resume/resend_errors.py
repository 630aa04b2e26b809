"""Errors of requests that the engine lost: server faults."""

from __future__ import annotations

from quintet.frontend.streams import StreamChoice
from quintet.wire.errors import ErrorCode, RequestError

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
