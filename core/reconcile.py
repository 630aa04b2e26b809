"""Do the core and its neighbours believe the same requests to be alive?

Every few seconds each frontend names the choices that it waits for, to the core and, on the path that they took, through
their tokenizers; the core names to each detokenizer those that it keeps there. What only one side has may be on its way to the
other; what only one side has in two accounts in a row is lost: it is counted, logged and given up, or sent again. Nothing is
ever found unless there is a fault.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Differences:
    """What two accounts in a row agree on."""

    orphans: list[int] = field(default_factory=list)
    """Alive here, and nobody there waits for them."""
    unknown: list[int] = field(default_factory=list)
    """Waited for there, and not alive here."""


class Reconciler:
    """Compares one neighbour's accounts with ours."""

    def __init__(self) -> None:
        self._suspects: set[int] = set()

    def compare(self, theirs: Sequence[int], ours: Iterable[int]) -> Differences:
        """Return what differed the last time already."""
        here, there = set(ours), set(theirs)
        before, self._suspects = self._suspects, here ^ there
        confirmed = sorted(before & self._suspects)
        return Differences(
            [request_id for request_id in confirmed if request_id in here],
            [request_id for request_id in confirmed if request_id in there],
        )


class Reconcilers:
    """One `Reconciler` per neighbour."""

    def __init__(self) -> None:
        self._by_frontend: dict[tuple[Hashable, int], Reconciler] = {}

    def compare(
        self, frontend: tuple[Hashable, int], theirs: Sequence[int], ours: Iterable[int]
    ) -> Differences:
        """Compare the account of the process at this place, in this epoch; those of its predecessors are forgotten."""
        if frontend not in self._by_frontend:
            self._by_frontend = {
                other: a for other, a in self._by_frontend.items() if other[0] != frontend[0]
            }
            self._by_frontend[frontend] = Reconciler()
        return self._by_frontend[frontend].compare(theirs, ours)


def by_slot(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Group ``(frontend, request id)`` by frontend."""
    grouped: dict[int, list[int]] = {}
    for frontend, request_id in pairs:
        grouped.setdefault(frontend, []).append(request_id)
    return grouped
