"""Reconciliation reports of a frontend: its live requests, for other processes to compare with theirs. Reads no clock.

A request that the engine lost is a server fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from quintet.frontend.streams import StreamChoice
from quintet.wire.codec import pack_i32, pack_i64
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import InFlightReport, Live

Report = tuple[Role, int, msgspec.Struct]
"""Destination role, index, and message."""

MAX_TIMES_UNKNOWN = 3
"""Maximum times that a request is resumed because the engine does not know it."""

MAX_TOKENIZER_DEATHS = 3
"""Deaths of tokenizers in a row, each while it encoded the same request, after which the request is rejected."""


def reports_of(me: WorkerId, cores: Sequence[int], choices: Iterable[StreamChoice]) -> Iterator[Report]:
    """Return the reports for choices that have not ended.

    Each core gets the choices that it has, and the parked ones. Each path (tokenizer, core) gets those sent over it.
    """
    waiting: list[int] = []
    by_core: dict[int, list[int]] = {core: [] for core in cores}
    by_path: dict[tuple[int, int], list[StreamChoice]] = {}
    for choice in choices:
        stream = choice.stream
        if stream.tokenizer is None:
            waiting.append(choice.request_id)
            continue
        by_core.setdefault(stream.submit.core, []).append(choice.request_id)
        by_path.setdefault((stream.tokenizer, stream.submit.core), []).append(choice)
    for core in cores:
        yield Role.CORE, core, Live(me, pack_i64([*by_core[core], *waiting]))
    for (tokenizer, its_core), handed in by_path.items():
        request_ids = pack_i64(choice.request_id for choice in handed)
        attempts = pack_i32(choice.stream.attempt for choice in handed)
        yield Role.TOKENIZER, tokenizer, InFlightReport(me, tokenizer, its_core, request_ids, attempts)


def unknown_request_error() -> RequestError:
    """Build the error for a request that the engine still does not know after it was resumed `MAX_TIMES_UNKNOWN` times."""
    return RequestError(
        ErrorCode.INTERNAL,
        f"The request was lost inside the server {MAX_TIMES_UNKNOWN + 1} times and is aborted. This is a server fault: "
        "report it with the server's log.",
    )


def poison_error() -> RequestError:
    """Build the error for a request or query that ended `MAX_TOKENIZER_DEATHS` tokenizers."""
    return RequestError(
        ErrorCode.UNPROCESSABLE,
        f"The tokenizer process died {MAX_TOKENIZER_DEATHS} times in a row while it encoded this request. Change the prompt "
        "or the parameters; report it with the server's log.",
    )


def missing_output_error(choice: StreamChoice, first_index: int, offset: int) -> RequestError:
    """Build the error for output that does not follow the output received so far."""
    return RequestError(
        ErrorCode.INTERNAL,
        f"Output of choice {choice.index} was lost inside the server: received token {first_index} at character "
        f"{offset} after {len(choice.output_ids)} tokens and {choice.num_chars} characters.",
    )
