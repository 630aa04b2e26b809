"""Which worker gets the next piece of work, and which workers were lost.

Knows the topology and this process's own outstanding work; knows nothing of requests or HTTP.
"""

from __future__ import annotations

from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import Seat, SeatState, Topology

SERVING_ROLES = (Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
"""Roles that must all be there for a request to be answered."""


class Seats:
    """The newest topology, and how much this process has outstanding at each worker."""

    def __init__(self, me: WorkerId) -> None:
        self._rotation = me.index
        self._alive: dict[tuple[Role, int], WorkerId] = {}
        self._load: dict[tuple[Role, int], int] = {}
        self.topology = Topology(0, [])
        self.ever_ready: set[Role] = set()
        """Roles of which a worker was ready at least once: what is missing of them now is being replaced."""

    def follow(self, topology: Topology) -> list[WorkerId]:
        """Take over a newer topology and return the workers that answer no more; an older one changes nothing."""
        if topology.version <= self.topology.version:
            return []
        self.topology = topology
        self.ever_ready |= {
            seat.worker.role for seat in topology.seats if seat.was_ready or seat.state is SeatState.READY
        }
        alive = {
            (seat.worker.role, seat.worker.index): seat.worker
            for seat in topology.seats
            if seat.state is not SeatState.DOWN
        }
        lost = [worker for key, worker in self._alive.items() if alive.get(key) != worker]
        self._alive = alive
        return lost

    def pick(self, role: Role) -> int | None:
        """Return the index of the least loaded worker that can take work, or None when there is none.

        A stalled worker is chosen only when no other is there. Ties are broken differently by each frontend, so that
        several of them do not all start with worker 0.
        """
        for state in (SeatState.READY, SeatState.STALLED):
            indexes = [
                s.worker.index for s in self.topology.seats if s.worker.role is role and s.state is state
            ]
            if indexes:
                return min(indexes, key=lambda index: self._weight(role, index, len(indexes)))
        return None

    def _weight(self, role: Role, index: int, count: int) -> tuple[int, int]:
        return self._load.get((role, index), 0), (index - self._rotation) % count

    def epoch(self, role: Role, index: int) -> int:
        """Return the epoch of the worker at this seat; 0 when nobody is there."""
        worker = self._alive.get((role, index))
        return 0 if worker is None else worker.epoch

    def add_load(self, role: Role, index: int, amount: int) -> None:
        """Count work given to a worker (or, negative, taken back from it)."""
        key = (role, index)
        self._load[key] = self._load.get(key, 0) + amount

    def load(self, role: Role, index: int) -> int:
        """Return what this process has outstanding at a worker."""
        return self._load.get((role, index), 0)

    def missing(self) -> list[Role]:
        """Return the serving roles of which no worker is ready."""
        ready = {seat.worker.role for seat in self.topology.seats if seat.state is SeatState.READY}
        return [role for role in SERVING_ROLES if role not in ready]

    def troubled(self) -> list[Seat]:
        """Return the seats that are stalled or down, but for those that nobody shall fill."""
        troubles = {SeatState.STALLED, SeatState.DOWN}
        return [s for s in self.topology.seats if s.state in troubles and not s.retired]
