"""The workers of the newest topology."""

from __future__ import annotations

from quintet.process.work_journal import WorkId, work_at_death
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import ProcessSlot, SlotState, Topology

SERVING_ROLES = (Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
"""Roles that must all be ready to answer a request."""


class Workers:
    """The newest topology."""

    def __init__(self, me: WorkerId, run_dir: str) -> None:
        """``run_dir``: folder with the journals of lost processes (`quintet.process.work_journal`)."""
        self.me = me
        self._run_dir = run_dir
        self.work_lost: frozenset[WorkId] = frozenset()
        """Requests and queries that tokenizers were encoding when they died, in the newest topology."""
        self._alive: dict[tuple[Role, int], WorkerId] = {}
        self._lost_detokenizers: dict[int, int] = {}
        """Newest lost epoch of each detokenizer index."""
        self.topology = Topology(0, [])
        self._engines: list[int] = []
        self._available: dict[Role, list[int]] = {}
        self.num_frontends = 1
        self.roles_seen_ready: set[Role] = set()
        """Roles with a worker that was ready at least once: a missing one is being replaced."""

    def follow(self, topology: Topology) -> list[WorkerId]:
        """Apply a newer topology and return the lost workers; ignore an older one."""
        if topology.version <= self.topology.version:
            return []
        self.topology = topology
        self.roles_seen_ready |= {
            slot.worker.role for slot in topology.slots if slot.was_ready or slot.state is SlotState.READY
        }
        alive = {
            (slot.worker.role, slot.worker.index): slot.worker
            for slot in topology.slots
            if slot.state is not SlotState.DOWN
        }
        lost = [worker for key, worker in self._alive.items() if alive.get(key) != worker]
        self._lost_detokenizers |= {
            worker.index: worker.epoch for worker in lost if worker.role is Role.DETOKENIZER
        }
        dead = [work_at_death(self._run_dir, worker) for worker in lost if worker.role is Role.TOKENIZER]
        self.work_lost = frozenset[WorkId]().union(*dead)
        self._alive = alive
        self._engines = self.ready_engines() or self._available_workers(Role.CORE)
        self.num_frontends = sum(
            slot.worker.role is Role.FRONTEND and slot.state is SlotState.READY for slot in topology.slots
        )
        self._available = {role: self._available_workers(role) for role in SERVING_ROLES}
        return lost

    def is_lost(self, detokenizer: tuple[int, int]) -> bool:
        """True for the index and epoch of a lost detokenizer: its requests were dispatched anew."""
        index, epoch = detokenizer
        return epoch <= self._lost_detokenizers.get(index, -1)

    def available(self, role: Role) -> list[int]:
        """Return the ready workers of a role; without any, the stalled ones."""
        return self._available.get(role, [])

    def _available_workers(self, role: Role) -> list[int]:
        for state in (SlotState.READY, SlotState.STALLED):
            indexes = [
                s.worker.index for s in self.topology.slots if s.worker.role is role and s.state is state
            ]
            if indexes:
                return indexes
        return []

    def ready_engines(self) -> list[int]:
        """Return the engines with a ready core and a ready executor."""
        well = {
            (slot.worker.role, slot.worker.index)
            for slot in self.topology.slots
            if slot.state is SlotState.READY
        }
        return [index for role, index in well if role is Role.CORE and (Role.EXECUTOR, index) in well]

    def unready_engines(self) -> frozenset[int]:
        """Return the engines with an executor that is down or starting."""
        absent = (SlotState.STARTING, SlotState.DOWN)
        return frozenset(
            slot.worker.index
            for slot in self.topology.slots
            if slot.worker.role is Role.EXECUTOR and slot.state in absent and not slot.retired
        )

    def engines(self) -> list[int]:
        """Return the engines that accept requests: ready ones, else those with an available core."""
        return self._engines

    def cores(self) -> list[int]:
        """Return the engines with a live core, whether it accepts requests or not."""
        return [index for role, index in self._alive if role is Role.CORE]

    def epoch(self, role: Role, index: int) -> int:
        """Return the epoch of the worker in this slot; 0 if empty."""
        worker = self._alive.get((role, index))
        return 0 if worker is None else worker.epoch

    def missing(self) -> list[Role]:
        """Return the serving roles without a ready worker."""
        ready = {slot.worker.role for slot in self.topology.slots if slot.state is SlotState.READY}
        if Role.CORE in ready and not self.ready_engines():
            ready.discard(Role.EXECUTOR)  # the ready executors belong to other cores
        return [role for role in SERVING_ROLES if role not in ready]

    def unhealthy(self) -> list[ProcessSlot]:
        """Return the slots that are stalled or down, except retired ones."""
        troubles = {SlotState.STALLED, SlotState.DOWN}
        return [s for s in self.topology.slots if s.state in troubles and not s.retired]
