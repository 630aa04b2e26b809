"""Boot state of the server: ability to serve, completion of the boot, and fatal failures.

a process dies that was ready                  restart
a process dies that was never ready            fatal until `has_served`; then restart, a few times
a slot is not ready within the boot timeout    fatal if no process of the slot was ready before
exit status 78 (configuration)                 always fatal
"""

from __future__ import annotations

from quintet.deploy.supervisor.process_slots import SlotRecord, SlotTable
from quintet.deploy.supervisor.startup_log import Failure, StartupLog
from quintet.wire.errors import EXIT_CONFIG
from quintet.wire.ids import Role
from quintet.wire.supervision import SlotState


class Boot:
    """Reads the process slots and reports each role to the startup log, once."""

    def __init__(self, slots: SlotTable, startup_log: StartupLog, timeout_s: float) -> None:
        self._slots = slots
        self._startup_log = startup_log
        self._timeout_s = timeout_s
        self._reported: set[Role] = set()
        self.has_served = False
        """True once a frontend may have answered /readyz with 200. Never reset."""

    def update(self) -> None:
        """Update `has_served`. Call before the slot of a dead process is vacated."""
        if not self.has_served:
            self.has_served = self._can_serve()

    def _can_serve(self) -> bool:
        ready = {(slot.role, slot.index) for slot in self._slots.own() if slot.state is SlotState.READY}
        engines = [index for role, index in ready if role is Role.CORE and (Role.EXECUTOR, index) in ready]
        roles = {role for role, _ in ready}
        return bool(engines) and roles.issuperset((Role.TOKENIZER, Role.DETOKENIZER, Role.FRONTEND))

    def report(self, role: Role) -> None:
        """Report a role to the startup log the first time that all its processes are ready."""
        siblings = [slot for slot in self._slots.own() if slot.role is role]
        if role not in self._reported and all(slot.state is SlotState.READY for slot in siblings):
            self._reported.add(role)
            self._startup_log.role_ready(siblings)

    def is_complete(self) -> bool:
        """True if all processes are ready and all frontends have acknowledged it, so none rejects the first request."""
        version = self._slots.version
        return all(
            slot.state is SlotState.READY and (slot.role is not Role.FRONTEND or slot.topology == version)
            for slot in self._slots.own()
        )

    def is_fatal(self, slot: SlotRecord, exit_status: int) -> bool:
        """True if the death of a slot's process ends the server at once."""
        return exit_status == EXIT_CONFIG or not (slot.was_ready or self.has_served)

    def timeout_failure(self, now: float) -> Failure | None:
        """Return the failure for slots that were never ready and exceeded the boot timeout, if any."""
        late = [
            slot
            for slot in self._slots.own()
            if not slot.was_ready and slot.process is not None and now - slot.spawned_at > self._timeout_s
        ]
        if not late:
            return None
        names = ", ".join(str(slot.worker) for slot in late)
        hint = "raise --boot-timeout, or see the log above"
        return Failure(names, f"not ready within {self._timeout_s:g} s", hint, 1)
