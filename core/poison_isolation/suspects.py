"""Poison isolation: find the request that makes the executor fail, by bisection.

It owns the suspects, the group on trial, and the number of deaths per suspect that ran alone. It does not handle
slots, blocks or messages; `quintet.core.poison_isolation.trial.reject_poison` ends the request found.

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

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import islice

from quintet.core.scheduler_state import InFlightPlan

DEATHS_ALONE = 3
"""Executor deaths in a row, with the request alone and no success in between, that prove it is the culprit."""

ClearThresholds = dict[int, int]
"""Request id -> tokens that it must have computed to be cleared."""


@dataclass(slots=True)
class Group:
    """Suspects to be tried together later, or split at once if one of them must be the culprit."""

    marks: ClearThresholds
    has_culprit: bool
    """An earlier loss is still unexplained if the suspects tried before them pass."""


class PoisonIsolation:
    """The current trial, and the groups that are tried after it."""

    __slots__ = ("_deaths_alone", "_groups", "_trial", "_uncleared")

    def __init__(self) -> None:
        self._trial: ClearThresholds = {}
        self._uncleared: ClearThresholds = {}
        """Requests on trial that have not passed their mark."""
        self._groups: list[Group] = []
        """The last one is tried next."""
        self._deaths_alone: dict[int, int] = {}

    @property
    def trial(self) -> frozenset[int] | None:
        """Requests that may run; None for all."""
        return frozenset(self._trial) if self._trial else None

    def describe(self) -> str:
        """Return the progress of the search as text."""
        if not self._trial:
            return "no request is suspected"
        num_later = sum(len(group.marks) for group in self._groups)
        return f"{len(self._trial)} requests run alone to be cleared, {num_later} after them"

    def is_suspect(self, request_id: int) -> bool:
        """Return True when a request is still a suspect."""
        return request_id in self._uncleared or any(request_id in group.marks for group in self._groups)

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
        for request_id, mark in self._uncleared.items():
            if request_id in lost:
                lost[request_id] = max(lost[request_id], mark)
        if self._groups:
            self._groups[-1].has_culprit = False
        others = {request_id: mark for request_id, mark in self._uncleared.items() if request_id not in lost}
        if others:
            self._groups.append(Group(others, has_culprit=False))
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
        uncleared = self._uncleared
        for request, end in zip(flight.rows, flight.ends, strict=True):
            mark = uncleared.get(request.request_id)
            if mark is not None and end >= mark:
                del uncleared[request.request_id]
                self._deaths_alone.pop(request.request_id, None)

    def have_passed(self, live: Container[int]) -> bool:
        """Return True when all requests on trial have passed their mark or left."""
        return not any(request_id in live for request_id in self._uncleared)

    def remain(self, live: Container[int]) -> bool:
        """Return True when further groups are to be tried."""
        return any(request_id in live for group in self._groups for request_id in group.marks)

    def advance(self, live: Container[int]) -> None:
        """Start the next trial, or end the search when no group is left."""
        while self._groups:
            group = self._groups.pop()
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
        self._groups.clear()
        self._deaths_alone.clear()

    def _split(self, marks: ClearThresholds, *, has_culprit: bool) -> None:
        ids = list(marks)
        half = (len(ids) + 1) // 2
        self._groups.append(Group({request_id: marks[request_id] for request_id in ids[half:]}, has_culprit))
        self._begin({request_id: marks[request_id] for request_id in ids[:half]})

    def _begin(self, marks: ClearThresholds) -> None:
        self._trial, self._uncleared = marks, dict(marks)


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
