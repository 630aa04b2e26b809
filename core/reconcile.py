"""Reconciliation of live requests between processes.

Every few seconds each frontend reports its live choices to the core, directly and through the tokenizers on their
path. The core reports to each detokenizer its live choices. A difference in one report may be a message in flight. A
difference in two reports in a row is a lost request: it is counted, logged, and dropped or resent. Without a fault
there are none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from quintet.core.engine import Engine
from quintet.wire.codec import unpack_i32, unpack_i64
from quintet.wire.ids import epoch_tag, frontend_of
from quintet.wire.messages import InFlightReport, Live


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


class Reconciliation:
    """Compares the reports of all frontends with the requests of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._direct = Reconcilers()
        self._by_path = Reconcilers()
        """Per path, a pair of frontend and tokenizer."""

    def orphans(self, account: Live) -> list[int]:
        """Return the requests of a frontend that are alive here, but not there."""
        slot = account.sender.index, epoch_tag(account.sender.epoch)
        ours = [request_id for request_id in self._engine.live_ids() if frontend_of(request_id) == slot]
        return self._direct.compare(slot, unpack_i64(account.request_ids), ours).orphans

    def unknown(self, account: InFlightReport) -> list[int]:
        """Return the requests that a tokenizer has forwarded for a frontend, but that are not alive here."""
        ids, attempts = unpack_i64(account.request_ids), unpack_i32(account.attempts)
        ours = [
            request_id
            for request_id, attempt in zip(ids, attempts, strict=True)
            if self._engine.is_alive(request_id, attempt)
        ]
        path = (account.sender.index, account.tokenizer), epoch_tag(account.sender.epoch)
        return self._by_path.compare(path, ids, ours).unknown


def by_slot(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Group ``(frontend, request id)`` by frontend."""
    grouped: dict[int, list[int]] = {}
    for frontend, request_id in pairs:
        grouped.setdefault(frontend, []).append(request_id)
    return grouped
