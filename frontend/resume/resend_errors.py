"""The errors of requests of which the server lost something: faults of ours."""

from __future__ import annotations

from quintet.frontend.streams import StreamChoice
from quintet.wire.errors import ErrorCode, RequestError

MAX_LOST = 3
"""So often a request that nobody in the engine knows is sent again."""


def lost_request() -> RequestError:
    """Make the error for a request that nobody knows, however often it is sent."""
    return RequestError(
        ErrorCode.INTERNAL,
        f"The request went missing inside the server {MAX_LOST + 1} times and is given up. This is a fault of the server: "
        "please report it with the server's log.",
    )


def lost_output(choice: StreamChoice, first_index: int, offset: int) -> RequestError:
    """Make the error for output that does not follow what was received."""
    return RequestError(
        ErrorCode.INTERNAL,
        f"Output of choice {choice.index} went missing inside the server: received token {first_index} at character "
        f"{offset} after {len(choice.output_ids)} tokens and {choice.num_chars} characters.",
    )
