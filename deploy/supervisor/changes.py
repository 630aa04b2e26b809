"""Rolling restarts and scaling of a serving server, without losing requests.

A change is a generator that yields the condition it waits for. The supervisor's loop resumes it when the condition holds.

    frontend, tokenizer, detokenizer:
        start a process in a new slot ──ready and acknowledged by all──▶ publish the old slot as RETIRING
        ──acknowledged by all──▶ Drain ──Drained or timeout──▶ Stop ──exited──▶ retired
    core, executor:
        Stop ──exited──▶ same slot, next epoch; requests recover as they do from a crash
    number of engines (a core and its executor):
        like a frontend; the core is drained, then both are stopped
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence

import msgspec

from quintet.deploy.supervisor.process_slots import SlotRecord, SlotTable
from quintet.wire.ids import Role
from quintet.wire.supervision import Drain, SlotState, Stop

SCALABLE = (Role.FRONTEND, Role.TOKENIZER, Role.DETOKENIZER)
"""Roles that scale independently of other roles."""

ENGINE_ROLES = {Role.CORE: (Role.EXECUTOR, Role.CORE)}
"""Roles added and removed together, at the same index. The core's role names the engine."""

Condition = Callable[[], bool]
Waiting = Generator[Condition, None, None]
Send = Callable[[Role, int, msgspec.Struct], bool]
Answer = Callable[[str, bool], None]
"""Sends the result of a change to the client that requested it: a line, and whether the change failed."""


class ChangeFailed(Exception):
    """The change failed; the message has the reason and the resulting state."""


class Changes:
    """The change in progress, if any. At most one."""

    def __init__(self, slots: SlotTable, fill: Callable[[SlotRecord], bool], send: Send) -> None:
        """``fill`` starts a process in a slot, and returns False if the system refuses."""
        self._slots = slots
        self._fill = fill
        self._send = send
        self._answer: Answer | None = None
        self._steps: Waiting | None = None
        self._condition: Condition = lambda: True
        self.name = ""
        """Command line of the change in progress; empty without one."""

    def begin(self, name: str, steps: Waiting, answer: Answer) -> None:
        """Start the change that `restart` or `scale` returned; ``answer`` sends its result. None may be in progress."""
        assert not self.name, f"{name} while {self.name}"
        self.name, self._steps, self._answer, self._condition = name, steps, answer, lambda: True

    def advance(self) -> None:
        """Resume the change while its condition holds."""
        while self._steps is not None and self._condition():
            try:
                self._condition = next(self._steps)
            except StopIteration:
                self._end(f"done: {self.name}")
            except ChangeFailed as error:
                self._end(str(error), failed=True)

    def cancel(self, reason: str) -> None:
        """Cancel the change in progress in its current state."""
        if self._steps is not None:
            self._end(f"{self.name} was given up: {reason}", failed=True)

    def _end(self, line: str, *, failed: bool = False) -> None:
        assert self._answer is not None
        answer, self._answer, self._steps, self.name = self._answer, None, None, ""
        answer(line, failed)

    def restart(self, role: Role, drain_timeout_s: float, say: Callable[[str], None]) -> Waiting:
        """Replace the processes of a role sequentially."""
        for slot in self._slots.active(role):
            if role in SCALABLE:
                yield from self._add(role, 1, say)
                yield from self._retire([slot], drain_timeout_s, say)
            else:
                yield from self._restart_in_place(slot, say)

    def scale(
        self, wanted: Mapping[Role, int], drain_timeout_s: float, say: Callable[[str], None]
    ) -> Waiting:
        """Scale each role to the wanted number of processes. The newest processes are retired first."""
        for role, count in wanted.items():
            active = self._slots.active(role)
            if count > len(active):
                yield from self._add(role, count - len(active), say)
            elif count < len(active):
                by_age = sorted(active, key=lambda slot: slot.spawned_at)
                yield from self._retire(self._with_partners(by_age[count:]), drain_timeout_s, say)
            else:
                say(f"there are {count} of {role} already")

    def _with_partners(self, slots: Sequence[SlotRecord]) -> list[SlotRecord]:
        """Return the slots and their partners of the same engine."""
        wanted = {(role, slot.index) for slot in slots for role in ENGINE_ROLES.get(slot.role, (slot.role,))}
        return [slot for slot in self._slots.own() if (slot.role, slot.index) in wanted]

    def _add(self, role: Role, count: int, say: Callable[[str], None]) -> Waiting:
        added = []
        for _ in range(count):
            for slot in self._slots.allocate(*ENGINE_ROLES.get(role, (role,))):
                slot.is_booting_new = self._fill(slot)
                slot.is_retiring = not slot.is_booting_new
                added.append(slot)
        began = time.monotonic()
        say(f"starting {_names(added)}")
        yield lambda: not any(slot.is_booting_new for slot in added)
        failed = [slot for slot in added if slot.is_retired]
        if failed:
            reason = "; ".join(f"{slot.worker}: {slot.note}" for slot in failed)
            indexes = {slot.index for slot in failed}
            partners = [slot for slot in added if slot.index in indexes and not slot.is_retired]
            if partners:
                yield from self._retire(partners, 0.0, say)
            raise ChangeFailed(f"a new process could not start ({reason}); the old processes still serve")
        yield self._slots.is_acknowledged
        say(f"{_names(added)} ready after {time.monotonic() - began:.1f} s")

    def _retire(self, leaving: Sequence[SlotRecord], timeout_s: float, say: Callable[[str], None]) -> Waiting:
        for slot in leaving:
            slot.is_retiring, slot.restart_at = True, None
        self._slots.is_changed = True
        say(f"retiring {_names(leaving)}")

        def running() -> list[SlotRecord]:
            return [slot for slot in leaving if slot.process is not None]

        yield lambda: self._slots.is_acknowledged() or not running()

        def busy() -> list[SlotRecord]:
            return [slot for slot in running() if not (slot.is_drained or slot.role is Role.EXECUTOR)]

        for slot in busy():
            self._send(slot.role, slot.index, Drain())
        deadline = time.monotonic() + timeout_s
        yield lambda: not busy() or time.monotonic() > deadline
        late = busy()
        if late:
            say(f"{_names(late)} not drained after {timeout_s:g} s; other processes take over the requests")
        self._stop(running())
        yield lambda: not running()
        self._slots.is_changed = True
        say(f"{_names(leaving)} left")

    def _restart_in_place(self, slot: SlotRecord, say: Callable[[str], None]) -> Waiting:
        before, began = slot.worker, time.monotonic()
        say(f"stopping {before}; its requests resume on the new process")
        self._stop([slot] if slot.process is not None else [])
        yield lambda: slot.worker != before and slot.state is SlotState.READY
        yield self._slots.is_acknowledged
        say(f"{slot.worker} ready after {time.monotonic() - began:.1f} s")

    def _stop(self, slots: Sequence[SlotRecord]) -> None:
        for slot in slots:
            slot.stopped_at = time.monotonic()
            self._send(slot.role, slot.index, Stop())


def _names(slots: Sequence[SlotRecord]) -> str:
    return ", ".join(str(slot.worker) for slot in slots)
