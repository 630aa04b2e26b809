"""Who made the executor fail: suspects are tried in halves until the culprit stands alone.

Owns who is suspected, who runs alone for that, and how often each suspect was alone when the executor died. Knows
nothing of slots, blocks or messages; what becomes of the convicted is `quintet.core.engine`'s business.

Whoever was in a step that the executor had and did not finish is a suspect. Half of the suspects run first, and nobody
else, until each has computed one token more than any step in flight had for it at the loss (its *mark*):

    loss: a b c d e f g h ──▶ trial a b c d ──all past their marks──▶ trial e f g h ──▶ everybody runs
                                   │ loss                                  │ loss
                                   ▼                                       ▼
                              trial a b, then c d, then e f g h       trial e f, then g h

Nothing is lost by this when nobody was at fault: all must be computed again anyway, and the halves are computed one
after the other. When somebody is, each loss halves the suspects. After a loss within a trial, a second half whose first
half passed is known to hold a culprit, so it is not run whole: it is split at once. New requests wait until all
suspects have been tried; a loss among them is a case of its own.

What a loss proves against a suspect that was alone depends on how the executor failed:

* It *raised*. The step that raised is known exactly, and so is who was in it: one row is proof.
* It *died*. Somebody may have killed it, or the machine ran out of memory for another's sake. Each time a suspect is
  tried alone it has to get no further than past its mark, which takes a few steps; to convict an innocent, somebody
  must kill three executors in a row, each within those few steps (`DEATHS_ALONE`).

One mark is enough to end the suspicion: who has passed it has done in another step all that it did in the lost one. One
token beyond it, because a request that was lost drawing its tokens one by one is computed again in larger pieces, and
must show that it survives a step like the lost one too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import islice

from quintet.core.scheduler_state import InFlightPlan

DEATHS_ALONE = 3
"""So often a request has to be alone in an executor that dies, without one success in between, to be convicted."""

Marks = dict[int, int]
"""Request id -> tokens that it must have computed to be cleared."""


@dataclass(slots=True)
class Group:
    """PoisonIsolation that will be tried together, unless it is known by then that one of them is guilty."""

    marks: Marks
    has_culprit: bool
    """Whether a loss without them was not explained, should those who are tried before them pass."""


class PoisonIsolation:
    """The present trial, and the groups that are tried after it."""

    __slots__ = ("_behind", "_deaths_alone", "_groups", "_trial")

    def __init__(self) -> None:
        self._trial: Marks = {}
        self._behind: Marks = {}
        """Of those on trial, who has not passed the mark."""
        self._groups: list[Group] = []
        """The last one is tried next."""
        self._deaths_alone: dict[int, int] = {}

    @property
    def trial(self) -> frozenset[int] | None:
        """Who may run; None for everybody."""
        return frozenset(self._trial) if self._trial else None

    def describe(self) -> str:
        """Say how the search stands."""
        if not self._trial:
            return "nobody is suspected"
        num_later = sum(len(group.marks) for group in self._groups)
        return f"{len(self._trial)} requests run alone to be cleared, {num_later} after them"

    def holds(self, request_id: int) -> bool:
        """Return whether a request is under suspicion still."""
        return request_id in self._behind or any(request_id in group.marks for group in self._groups)

    def lose(self, flights: Iterable[InFlightPlan], live: Container[int], *, raised: bool) -> int | None:
        """Take note that the executor failed with ``flights``, oldest first; return who is convicted of it, if anyone.

        ``raised``: it raised in the oldest; else it died in any of them. Afterwards a trial is open, unless nobody
        is suspected.
        """
        everybody = _marks_of(islice(flights, 1) if raised else flights)
        lost = {request_id: mark for request_id, mark in everybody.items() if request_id in live}
        if not lost:
            return None  # nobody ran, or whoever did has left: a trial, if there is one, begins again
        was_trial = bool(self._trial)
        for request_id, mark in self._behind.items():
            if request_id in lost:
                lost[request_id] = max(lost[request_id], mark)
        if self._groups:
            self._groups[-1].has_culprit = False
        others = {request_id: mark for request_id, mark in self._behind.items() if request_id not in lost}
        if others:
            self._groups.append(Group(others, has_culprit=False))
        if len(lost) > 1:
            self._split(lost, has_culprit=was_trial)
            return None
        (suspect,) = lost
        if len(everybody) > 1:
            self._begin(lost)  # it may have been one who has left
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
        """Take note that a step succeeded."""
        behind = self._behind
        for request, end in zip(flight.rows, flight.ends, strict=True):
            mark = behind.get(request.request_id)
            if mark is not None and end >= mark:
                del behind[request.request_id]
                self._deaths_alone.pop(request.request_id, None)

    def have_passed(self, live: Container[int]) -> bool:
        """Return whether everybody on trial has passed the mark or has left."""
        return not any(request_id in live for request_id in self._behind)

    def remain(self, live: Container[int]) -> bool:
        """Return whether anybody is to be tried after the present trial."""
        return any(request_id in live for group in self._groups for request_id in group.marks)

    def advance(self, live: Container[int]) -> None:
        """Begin the next trial, or end the search when nobody is left to be tried."""
        while self._groups:
            group = self._groups.pop()
            marks = {request_id: mark for request_id, mark in group.marks.items() if request_id in live}
            if group.has_culprit and len(marks) > 1:
                self._split(marks, has_culprit=True)
                return
            if marks:
                self._begin(marks)
                return
        self.acquit_all()

    def acquit_all(self) -> None:
        """End the search."""
        self._begin({})
        self._groups.clear()
        self._deaths_alone.clear()

    def _split(self, marks: Marks, *, has_culprit: bool) -> None:
        ids = list(marks)
        half = (len(ids) + 1) // 2
        self._groups.append(Group({request_id: marks[request_id] for request_id in ids[half:]}, has_culprit))
        self._begin({request_id: marks[request_id] for request_id in ids[:half]})

    def _begin(self, marks: Marks) -> None:
        self._trial, self._behind = marks, dict(marks)


def _marks_of(flights: Iterable[InFlightPlan]) -> Marks:
    """Return who is in these steps, and how far each must come to be cleared."""
    marks: Marks = {}
    for flight in flights:
        for request, end in zip(flight.rows, flight.ends, strict=True):
            marks[request.request_id] = max(marks.get(request.request_id, 0), end + 1)
    return marks
