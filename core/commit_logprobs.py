"""Log-probabilities of a committed step: those that the detokenizers lack, by row of their messages."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from quintet.core.requests.request import Request
from quintet.core.scheduler_state import InFlightPlan
from quintet.core.token_messages import TokensBuilders
from quintet.wire.step import PromptLogprobs, StepResult, TokenLogprobs


def forward_logprobs(flight: InFlightPlan, result: StepResult, outbox: TokensBuilders, now_ns: int) -> None:
    """Forward log-probabilities, with row numbers of the `Tokens` messages instead of the plan."""
    rows_of = {
        index: {request_id: row for row, request_id in enumerate(builder.request_ids)}
        for index, builder in outbox.builders.items()
    }
    for entry in result.prompt_logprobs:
        request = flight.rows[entry.row]
        if request.generation != flight.generations[entry.row]:
            continue
        unseen = _unseen_part(request, entry)
        if unseen is None:
            continue
        builder = outbox.builder_for(request, now_ns)
        rows = rows_of.setdefault(request.detokenizer, {})
        if request.request_id not in rows:
            rows[request.request_id] = builder.add_empty(request)
        unseen.row = rows[request.request_id]
        builder.prompt_logprobs.append(unseen)
    num_entries: Counter[int] = Counter()
    for drawn in result.logprobs:
        request = flight.rows[drawn.row]
        if request.generation != flight.generations[drawn.row]:
            continue
        builder = outbox.builders[request.detokenizer]
        row = rows_of[request.detokenizer][request.request_id]
        num_entries[request.request_id] += 1
        if num_entries[request.request_id] <= builder.num_tokens.get(
            row, 1
        ):  # else after the token that ended the request
            builder.logprobs.append(TokenLogprobs(row, drawn.rank, drawn.token_ids, drawn.logprobs))


def _unseen_part(request: Request, entry: PromptLogprobs) -> PromptLogprobs | None:
    """Cut off positions that were sent before: a preempted prompt is recomputed, possibly in other chunks."""
    num_entries = len(entry.ranks) // 4
    skip = max(0, request.delivery.prompt_logprobs_end - entry.first)
    if skip >= num_entries:
        return None
    request.delivery.prompt_logprobs_end = entry.first + num_entries
    width = 4 * entry.width
    return replace(
        entry,
        first=entry.first + skip,
        ranks=entry.ranks[4 * skip :],
        token_ids=entry.token_ids[width * skip :],
        logprobs=entry.logprobs[width * skip :],
    )
