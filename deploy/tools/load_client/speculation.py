"""Acceptance of draft tokens in a run, from the counters of ``/metrics`` before and after it.

The names are vLLM's; Quintet and vLLM export them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import msgspec

from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ask
from quintet.deploy.tools.load_client.talk import ServerError

_SERIES = re.compile(r"^vllm:spec_decode_num_(\w+?)(?:_total)?(?:{(.*)})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')

Counters = Counter[str]
"""Values by name, without prefix; of ``accepted_tokens_per_pos`` by position: ``"0"``, ``"1"``…"""


class Acceptance(msgspec.Struct):
    """Acceptance of the draft tokens of a run."""

    num_drafts: int
    """Rows of steps that verified draft tokens."""
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float
    """Accepted draft tokens over verified ones."""
    mean_acceptance_length: float
    """Tokens of a row with drafts: the drawn one, and the accepted drafts."""
    acceptance_per_position: list[float]
    """Share of the rows in which the draft at this position was accepted."""


def read_counters(target: Target) -> Counters:
    """Return the server's counters, summed over engines. Raises `ServerError` if the server does not answer them."""
    answer = ask(target, "GET", "/metrics")
    if answer.status != 200:
        raise ServerError(f"GET /metrics answered {answer.status}; --speculative-report reads its counters")
    return counters_of(answer.body.decode())


def counters_of(text: str) -> Counters:
    """Return the counters in a Prometheus text."""
    counters: Counters = Counter()
    for name, value in _values(text):
        counters[name] += int(float(value))
    return counters


def _values(text: str) -> Iterator[tuple[str, str]]:
    for name, labels, value in _SERIES.findall(text):
        if name != "accepted_tokens_per_pos":
            yield name, value
        elif position := _POSITION.search(labels):
            yield position[1], value


def acceptance(before: Counters, after: Counters) -> Acceptance | None:
    """Return the acceptance between two readings; None if no draft was verified."""
    num_drafts, num_draft_tokens, num_accepted = (
        after[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if not num_drafts or not num_draft_tokens:
        return None
    positions = sorted((name for name in after if name.isdecimal()), key=int)
    return Acceptance(
        num_drafts=num_drafts,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted,
        acceptance_rate=round(num_accepted / num_draft_tokens, 4),
        mean_acceptance_length=round(1 + num_accepted / num_drafts, 4),
        acceptance_per_position=[round((after[name] - before[name]) / num_drafts, 4) for name in positions],
    )


def acceptance_lines(accepted: Acceptance | None) -> list[str]:
    """Format the acceptance as lines of text."""
    if accepted is None:
        return ["drafts       none was verified"]
    shares = " ".join(f"{100 * share:.0f}" for share in accepted.acceptance_per_position)
    return [
        f"drafts       {accepted.num_accepted_tokens} of {accepted.num_draft_tokens} accepted, "
        f"{100 * accepted.acceptance_rate:.1f} %",
        f"             {accepted.mean_acceptance_length:.2f} tokens per row with drafts, of {accepted.num_drafts} rows",
        f"             accepted by position, in %: {shares}",
    ]
