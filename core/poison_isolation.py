"""Poison isolation: find the request that makes the executor fail, by bisection, end it, and reject its repetitions.

Every request in an unfinished step is a suspect. Half of the suspects run first, and no other request runs with them:

    loss: a b c d e f g h ──▶ trial a b c d ──all past their marks──▶ trial e f g h ──▶ all requests run
                                   │ loss                                  │ loss
                                   ▼                                       ▼
                              trial a b, then c d, then e f g h       trial e f, then g h

Without a culprit this costs nothing: all must be recomputed anyway, and the halves run in sequence. With one, each
loss halves the suspects. After a loss within a trial, the second half contains the culprit if the first half passed,
so it is split at once. New requests wait until all suspects are tried; a loss among them is a separate case.

Proof depends on the kind of failure:

* It *raised*. The failed step is known exactly, and so are its requests: one row is proof.
* It *died*. The cause may be outside, such as a kill or an out-of-memory condition. A suspect tried alone runs only until its
  mark, which takes a few steps. A false result needs three outside kills in a row within those steps (`DEATHS_ALONE`).

A suspect is cleared once it passes its mark: it has then repeated all work of the lost step. The mark is one token
beyond that step, because recomputation uses larger chunks and must also survive a decode step. Drafts of the lost steps
count as accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice

import msgspec

from quintet.core.requests.request import Request
from quintet.core.scheduler_state import InFlightPlan, SchedulerState
from quintet.core.token_messages import StepMessages, TokensBuilders
from quintet.wire.codec import encode, pack_i32
from quintet.wire.embeds import EmbedsSpan
from quintet.wire.errors import ErrorCode
from quintet.wire.messages import Admit, Failed
from quintet.wire.params import SamplingParams

DEATHS_ALONE = 3
"""Executor deaths in a row, with the request alone and no success in between, that prove it is the culprit."""

REJECTION_TTL_S = 600
"""TTL of an entry: a repeated poison request then interrupts other requests every ten minutes, not every second."""

MAX_REJECTIONS = 1024

ClearThresholds = dict[int, int]
"""Request id -> tokens that it must have computed to be cleared."""


@dataclass(slots=True)
class Group:
    """Suspects to be tried together later, or split at once if one of them must be the culprit."""

    marks: ClearThresholds
    has_culprit: bool
    """An earlier loss is still unexplained if the suspects tried before them pass."""


@dataclass(slots=True)
class PoisonIsolation:
    """The current trial, and the groups that are tried after it."""

    _trial: ClearThresholds = field(default_factory=dict)
    uncleared: ClearThresholds = field(default_factory=dict)
    """Requests on trial that have not passed their mark."""
    groups: list[Group] = field(default_factory=list)
    """The last one is tried next."""
    _deaths_alone: dict[int, int] = field(default_factory=dict)

    @property
    def trial(self) -> frozenset[int] | None:
        """Requests that may run; None for all."""
        return frozenset(self._trial) if self._trial else None

    def describe(self) -> str:
        if not self._trial:
            return "no request is suspected"
        num_later = sum(len(group.marks) for group in self.groups)
        return f"{len(self._trial)} requests run alone to be cleared, {num_later} after them"

    def is_suspect(self, request_id: int) -> bool:
        return request_id in self.uncleared or any(request_id in group.marks for group in self.groups)

    def note_failure(
        self, flights: Iterable[InFlightPlan], live: Container[int], *, raised: bool
    ) -> int | None:
        """Record that the executor failed with ``flights``, oldest first; return the culprit if it is proven.

        ``raised``: the oldest step raised; otherwise the executor died in any of them. Opens a trial unless no
        request is suspected.
        """
        all_marks = _thresholds_of(islice(flights, 1) if raised else flights)
        lost = {request_id: mark for request_id, mark in all_marks.items() if request_id in live}
        if not lost:
            return None  # none ran, or all have left: a trial, if any, is repeated
        was_trial = bool(self._trial)
        for request_id, mark in self.uncleared.items():
            if request_id in lost:
                lost[request_id] = max(lost[request_id], mark)
        if self.groups:
            self.groups[-1].has_culprit = False
        others = {request_id: mark for request_id, mark in self.uncleared.items() if request_id not in lost}
        if others:
            self.groups.append(Group(others, has_culprit=False))
        if len(lost) > 1:
            self._split(lost, has_culprit=was_trial)
            return None
        (suspect,) = lost
        if len(all_marks) > 1:
            self._begin(lost)  # the culprit may have been one that left
            return None
        num_deaths = self._deaths_alone.get(suspect, 0) + 1
        if raised or num_deaths >= DEATHS_ALONE:
            self._deaths_alone.pop(suspect, None)
            self._begin({})
            return suspect
        self._deaths_alone[suspect] = num_deaths
        self._begin(lost)
        return None

    def note_step(self, flight: InFlightPlan) -> None:
        """Record that a step succeeded."""
        uncleared = self.uncleared
        for request, end in zip(flight.rows, flight.ends, strict=True):
            mark = uncleared.get(request.request_id)
            if mark is not None and end >= mark:
                del uncleared[request.request_id]
                self._deaths_alone.pop(request.request_id, None)

    def advance(self, live: Container[int]) -> None:
        """Start the next trial, or end the search when no group is left."""
        while self.groups:
            group = self.groups.pop()
            marks = {request_id: mark for request_id, mark in group.marks.items() if request_id in live}
            if group.has_culprit and len(marks) > 1:
                self._split(marks, has_culprit=True)
                return
            if marks:
                self._begin(marks)
                return
        self.clear()

    def clear(self) -> None:
        """End the search."""
        self._begin({})
        self.groups.clear()
        self._deaths_alone.clear()

    def _split(self, marks: ClearThresholds, *, has_culprit: bool) -> None:
        ids = list(marks)
        half = (len(ids) + 1) // 2
        self.groups.append(Group({request_id: marks[request_id] for request_id in ids[half:]}, has_culprit))
        self._begin({request_id: marks[request_id] for request_id in ids[:half]})

    def _begin(self, marks: ClearThresholds) -> None:
        self._trial, self.uncleared = marks, dict(marks)


def _thresholds_of(flights: Iterable[InFlightPlan]) -> ClearThresholds:
    """Return the requests of these steps, with the mark of each."""
    marks: ClearThresholds = {}
    for flight in flights:
        most_ends = flight.ends
        if flight.drafts:
            columns = zip(flight.ends, flight.num_unverified_drafts, strict=True)
            most_ends = [end + num_drafts for end, num_drafts in columns]
        for request, end in zip(flight.rows, most_ends, strict=True):
            marks[request.request_id] = max(marks.get(request.request_id, 0), end + 1)
    return marks


def fingerprint(prompt_ids: bytes, params: SamplingParams, embeds: Sequence[EmbedsSpan] = ()) -> bytes:
    """Return the fingerprint of prompt and parameters, except seed and number of choices. ``prompt_ids``: int32."""
    settings = encode(msgspec.structs.replace(params, seed=None, n=1))
    settings += b"".join(span.start.to_bytes(4, "little") + span.digest for span in embeds)
    return sha256(len(prompt_ids).to_bytes(8, "little") + prompt_ids + settings).digest()


def fingerprint_of(request: Request) -> bytes:
    return fingerprint(pack_i32(request.tokens[: request.num_prompt]), request.spec.params, request.embeds)


class Rejections:
    """Fingerprints of poison requests, with cause and expiry. Bounded: the oldest entry is forgotten first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        """Fingerprint -> expiry and cause, oldest first."""

    def add(self, key: bytes, cause: str, now_ns: int) -> None:
        """Reject requests with this fingerprint from now on."""
        self.entries[key] = (now_ns + REJECTION_TTL_S * 1_000_000_000, cause)
        self.entries.move_to_end(key)
        if len(self.entries) > MAX_REJECTIONS:
            self.entries.popitem(last=False)

    def answer_to(self, admit: Admit, now_ns: int) -> Failed | None:
        """Return the rejection of a request, or None."""
        key = fingerprint(admit.prompt_ids, admit.spec.params, admit.embeds)
        entry = self.entries.get(key)
        if entry is None:
            return None
        until_ns, cause = entry
        if until_ns <= now_ns:
            del self.entries[key]
            return None
        left_s = -(-(until_ns - now_ns) // 1_000_000_000)
        message = (
            f"A request with the same prompt and the same parameters made the executor fail ({cause}), so this one was "
            f"rejected. Change the prompt or the parameters, or retry in {left_s} s."
        )
        return Failed(admit.request_id, ErrorCode.UNPROCESSABLE, message, retry_s=left_s)


def advance_trial(state: SchedulerState, suspects: PoisonIsolation) -> bool:
    """Start the next trial when the current one is over. Return True when a step may be planned now."""
    if any(request_id in state.live for request_id in suspects.uncleared):
        return True
    if any(request_id in state.live for group in suspects.groups for request_id in group.marks):
        if state.in_flight:
            return False  # steps in flight of other requests must not be blamed on the next suspects
        for request in list(state.running):
            state.preempt(request)
    suspects.advance(state.live)
    state.trial = suspects.trial
    return True


def reject_poison(
    state: SchedulerState,
    suspects: PoisonIsolation,
    rejections: Rejections,
    request_id: int,
    failure: str,
    now_ns: int,
) -> StepMessages:
    """End all choices of the culprit, and reject requests with the same fingerprint.

    ``failure`` is the executor's exception; empty when it died. Live requests with the same fingerprint end too,
    unless they were computed successfully before.
    """
    outbox = TokensBuilders()
    culprit = state.live.get(request_id)
    if culprit is None:
        return outbox.effects(state.step, now_ns)
    cause = failure or f"its process died {DEATHS_ALONE} times in a row while it computed nothing else"
    message = (
        f"This request made the executor fail: {cause}. Requests with this prompt and these parameters are rejected for "
        f"{REJECTION_TTL_S} s; change the prompt or the parameters."
    )
    key, first = fingerprint_of(culprit), culprit.first_id
    rejections.add(key, cause, now_ns)
    ended: set[int] = set()
    for request in list(state.live.values()):
        is_choice = request.first_id == first
        is_unproven = request.stats.scheduled_ns is None or suspects.is_suspect(request.request_id)
        if is_choice or (is_unproven and fingerprint_of(request) == key):
            ended.add(request.first_id)
            outbox.close(request)
            outbox.failed.append(
                Failed(request.request_id, ErrorCode.UNPROCESSABLE, message, retry_s=REJECTION_TTL_S)
            )
            request.delivery.origin = None  # not retained for its client
            state.retire(request)
    state.counters.poison_requests += len(ended)
    return outbox.effects(state.step, now_ns)
