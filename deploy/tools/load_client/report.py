"""Summary of outcomes: percentiles, rates and failures by category, as text table or JSON.

The acceptance of draft tokens is from the counters of ``/metrics`` before and after the run. The names are vLLM's; Quintet and
vLLM export them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ask
from quintet.deploy.tools.load_client.load import Outcome, Run
from quintet.deploy.tools.load_client.talk import ServerError

_PERCENTILES = (50, 90, 99)


class Spread(msgspec.Struct):
    """Distribution of a time, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Failures(msgspec.Struct):
    kind: str
    count: int
    example: str


class Summary(msgspec.Struct):
    num_requests: int
    num_completed: int
    duration_s: float
    requests_per_s: float
    output_tokens: int
    """From the server's usage, else the number of events."""
    output_tokens_per_s: float
    output_events: int
    """Received frames with text."""
    output_events_per_s: float
    prompt_tokens: int
    cached_prompt_tokens: int
    has_usage: bool
    ttft_ms: Spread | None
    """From sending to the first frame with text."""
    inter_token_ms: Spread | None
    """Between events of a stream; events of one socket read are simultaneous."""
    time_per_output_token_ms: Spread | None
    """Per request: time from first text to end, divided by the number of tokens after the first."""
    end_to_end_ms: Spread | None
    late_ms: Spread | None
    """Delay between arrival time and sending."""
    failures: list[Failures]


def spread(values_s: Sequence[float] | NDArray[np.float64]) -> Spread | None:
    """Summarise times in seconds; None for an empty sequence."""
    values_ms = np.asarray(values_s, dtype=np.float64) * 1e3
    if values_ms.size == 0:
        return None
    p50, p90, p99 = (round(float(v), 4) for v in np.percentile(values_ms, _PERCENTILES))
    return Spread(
        int(values_ms.size),
        round(float(values_ms.mean()), 4),
        p50,
        p90,
        p99,
        round(float(values_ms.max()), 4),
    )


def summarise(run: Run) -> Summary:
    good = [o for o in run.outcomes if o.failure is None]
    duration_s = max(run.end_s - run.start_s, 1e-9)
    tokens = sum(_output_tokens(o) for o in good)
    events = sum(o.tally.num_events for o in good)
    usages = [o.tally.usage for o in good if o.tally.usage is not None]
    cached = [
        u.prompt_tokens_details.cached_tokens or 0 for u in usages if u.prompt_tokens_details is not None
    ]
    return Summary(
        num_requests=len(run.outcomes),
        num_completed=len(good),
        duration_s=round(duration_s, 4),
        requests_per_s=round(len(good) / duration_s, 3),
        output_tokens=tokens,
        output_tokens_per_s=round(tokens / duration_s, 2),
        output_events=events,
        output_events_per_s=round(events / duration_s, 2),
        prompt_tokens=sum(u.prompt_tokens for u in usages),
        cached_prompt_tokens=sum(cached),
        has_usage=bool(good) and len(usages) == len(good),
        ttft_ms=spread([o.tally.first_s - o.start_s for o in good if o.tally.first_s is not None]),
        inter_token_ms=spread(_gaps(good)),
        time_per_output_token_ms=spread(
            [
                (o.tally.last_s - o.tally.first_s) / (_output_tokens(o) - 1)
                for o in good
                if o.tally.first_s is not None and _output_tokens(o) > 1
            ]
        ),
        end_to_end_ms=spread([o.end_s - o.start_s for o in good]),
        late_ms=spread([o.start_s - o.due_s for o in run.outcomes]),
        failures=_failures(run.outcomes),
    )


def table(summary: Summary) -> str:
    s = summary
    lines = [
        f"requests     {s.num_completed} of {s.num_requests} completed in {s.duration_s:.2f} s, {s.requests_per_s:.2f} /s",
        f"output       {s.output_tokens} tokens{'' if s.has_usage else ' (counted as events: no usage sent)'}, "
        f"{s.output_tokens_per_s:,.1f} tokens/s; {s.output_events} events, {s.output_events_per_s:,.1f} /s",
    ]
    if s.has_usage:
        lines.append(f"prompt       {s.prompt_tokens} tokens, {s.cached_prompt_tokens} from the prefix cache")
    lines += ["", f"{'milliseconds':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"]
    for name, row in (
        ("time to first token", s.ttft_ms),
        ("between events", s.inter_token_ms),
        ("per output token", s.time_per_output_token_ms),
        ("end to end", s.end_to_end_ms),
        ("sent late by", s.late_ms if s.late_ms is not None and s.late_ms.p99 > 5 else None),
    ):
        if row is not None:
            lines.append(
                f"{name:<22}{row.mean:>10.3f}{row.p50:>10.3f}{row.p90:>10.3f}{row.p99:>10.3f}{row.max:>10.3f}"
            )
    if s.failures:
        lines += ["", "failures"]
        lines += [f"  {f.count:>6} x {f.kind}: {f.example}" for f in s.failures]
    return "\n".join(lines)


def _output_tokens(outcome: Outcome) -> int:
    usage = outcome.tally.usage
    return outcome.tally.num_events if usage is None else usage.completion_tokens


def _gaps(outcomes: Sequence[Outcome]) -> NDArray[np.float64]:
    """Return the gaps between consecutive events of each stream, in seconds."""
    parts: list[NDArray[np.float64]] = []
    num_simultaneous = 0
    for outcome in outcomes:
        tally = outcome.tally
        parts.append(np.diff(np.frombuffer(tally.read_times_s, dtype=np.float64)))
        num_simultaneous += tally.num_events - len(tally.read_events)
    parts.append(np.zeros(num_simultaneous))
    return np.concatenate(parts)


def _failures(outcomes: Sequence[Outcome]) -> list[Failures]:
    counts = Counter(o.failure for o in outcomes if o.failure is not None)
    examples = {o.failure: o.message for o in reversed(outcomes)}
    return [Failures(str(kind), count, examples[kind]) for kind, count in counts.most_common()]


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
    if accepted is None:
        return ["drafts       none was verified"]
    shares = " ".join(f"{100 * share:.0f}" for share in accepted.acceptance_per_position)
    return [
        f"drafts       {accepted.num_accepted_tokens} of {accepted.num_draft_tokens} accepted, "
        f"{100 * accepted.acceptance_rate:.1f} %",
        f"             {accepted.mean_acceptance_length:.2f} tokens per row with drafts, of {accepted.num_drafts} rows",
        f"             accepted by position, in %: {shares}",
    ]
