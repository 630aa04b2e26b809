"""Reconciliation of live requests between processes.

Every few seconds each frontend reports its live choices to the core, directly and through the tokenizers on their
path. The core reports to each detokenizer its live choices. A difference in one report may be a message in flight. A
difference in two reports in a row is a lost request: it is counted, logged, and dropped or resent. Without a fault
there are none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Differences:
    """Differences confirmed by two reports in a row."""

    orphans: list[int] = field(default_factory=list)
    """Alive here, but not at the other process."""
    unknown: list[int] = field(default_factory=list)
    """Alive at the other process, but not here."""


class Reconciler:
    """Compares the reports of one process with the local requests."""

    def __init__(self) -> None:
        self._suspects: set[int] = set()

    def compare(self, theirs: Sequence[int], ours: Iterable[int]) -> Differences:
        """Return the differences that the previous report had too."""
        local_ids, remote_ids = set(ours), set(theirs)
        before, self._suspects = self._suspects, local_ids ^ remote_ids
        confirmed = sorted(before & self._suspects)
        return Differences(
            [request_id for request_id in confirmed if request_id in local_ids],
            [request_id for request_id in confirmed if request_id in remote_ids],
        )


class Reconcilers:
    """One `Reconciler` per reporting process."""

    def __init__(self) -> None:
        self._by_frontend: dict[tuple[Hashable, int], Reconciler] = {}

    def compare(
        self, frontend: tuple[Hashable, int], theirs: Sequence[int], ours: Iterable[int]
    ) -> Differences:
        """Compare the report of a process in this epoch; reports of earlier epochs are forgotten."""
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
