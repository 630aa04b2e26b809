"""Reconciliation of live requests between processes.

Every few seconds each frontend reports its live choices to the core, directly and through the tokenizers on their
path. The core reports to each detokenizer its live choices. A difference in one report may be a message in flight. A
difference in two reports in a row is a lost request: it is counted, logged, and dropped or resumed. Without a fault
there are none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from quintet.core.engine import Engine
from quintet.wire.codec import unpack_i32, unpack_i64
from quintet.wire.ids import epoch_tag, frontend_of
from quintet.wire.messages import InFlightReport, Live


class Reconciler:
    """Compares the reports of other processes with the local requests."""

    def __init__(self) -> None:
        self._suspects: dict[tuple[Hashable, int], set[int]] = {}
        """Reporter and its epoch -> differences of its newest report."""

    def compare(
        self, reporter: tuple[Hashable, int], theirs: Iterable[int], ours: Iterable[int]
    ) -> tuple[list[int], list[int]]:
        """Return the differences that the previous report had too: requests alive only here, and only there.

        Reports of other epochs of the reporter are forgotten.
        """
        local_ids, remote_ids = set(ours), set(theirs)
        if reporter not in self._suspects:
            others = {other: ids for other, ids in self._suspects.items() if other[0] != reporter[0]}
            self._suspects = others | {reporter: set()}
        confirmed = self._suspects[reporter] & (local_ids ^ remote_ids)
        self._suspects[reporter] = local_ids ^ remote_ids
        return sorted(confirmed & local_ids), sorted(confirmed & remote_ids)


class Reconciliation:
    """Compares the reports of all frontends with the requests of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reconciler = Reconciler()

    def orphans(self, account: Live) -> list[int]:
        """Return the requests of a frontend that are alive here, but not there."""
        slot = account.sender.index, epoch_tag(account.sender.epoch)
        ours = [request_id for request_id in self._engine.live if frontend_of(request_id) == slot]
        orphans, _ = self._reconciler.compare(slot, unpack_i64(account.request_ids), ours)
        return orphans

    def unknown(self, account: InFlightReport) -> list[int]:
        """Return the requests that a tokenizer has forwarded for a frontend, but that are not alive here."""
        ids, attempts, live = unpack_i64(account.request_ids), unpack_i32(account.attempts), self._engine.live
        ours = [
            request_id
            for request_id, attempt in zip(ids, attempts, strict=True)
            if request_id in live and live[request_id].delivery.attempt >= attempt
        ]
        path = (account.sender.index, account.tokenizer), epoch_tag(account.sender.epoch)
        _, unknown = self._reconciler.compare(path, ids, ours)
        return unknown


def by_slot(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Group ``(frontend, request id)`` by frontend."""
    grouped: dict[int, list[int]] = {}
    for frontend, request_id in pairs:
        grouped.setdefault(frontend, []).append(request_id)
    return grouped
