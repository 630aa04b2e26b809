"""Changes of who is there while the server serves: new processes for a role, more of them, or fewer; nothing is lost.

A change is a generator that yields what it waits for; the supervisor's loop takes it a step further whenever that is so.

    frontend, tokenizer, detokenizer:  a new process in a slot of its own ──ready, and known to everyone──▶ the old slot is
        published as RETIRING: nothing new goes there ──known to everyone──▶ Drain ──Drained, or too late──▶ Stop ──gone──▶ out
    core, executor:  Stop ──gone──▶ the same slot, next epoch; their requests recover as they do from a death
    engines (a core and its executor), when their number changes: as the first; the core is asked to drain, both leave
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

import msgspec

from quintet.deploy.supervisor.process_slots import SlotRecord, SlotTable
from quintet.wire.ids import Role
from quintet.wire.supervision import Drain, SlotState, Stop

SCALABLE = (Role.FRONTEND, Role.TOKENIZER, Role.DETOKENIZER)
"""Roles whose processes come and go alone."""

TOGETHER = {Role.CORE: (Role.EXECUTOR, Role.CORE)}
"""Roles that others come and go with, at the same index: an engine goes by the name of its core."""

Condition = Callable[[], bool]
Waiting = Generator[Condition, None, None]
Send = Callable[[Role, int, msgspec.Struct], bool]


class CommandReply(Protocol):
    """Whoever asked for the change."""

    def say(self, line: str) -> None:
        """Tell of progress."""

    def end(self, line: str, *, failed: bool = False) -> None:
        """Tell how it ended."""


class ChangeFailed(Exception):
    """The change cannot go on; the message says why, and how things are now."""


class Changes:
    """The change in progress, if there is one. One at a time."""

    def __init__(self, slots: SlotTable, fill: Callable[[SlotRecord], None], send: Send) -> None:
        self._slots = slots
        self._fill = fill
        self._send = send
        self._answer: CommandReply | None = None
        self._steps: Waiting | None = None
        self._condition: Condition = lambda: True
        self.name = ""
        """What is being done, in the words of whoever asked; empty when nothing is."""

    def begin(self, name: str, steps: Waiting, answer: CommandReply) -> None:
        """Begin with what `restart` or `scale` returned; ``answer`` hears how it goes. Nothing may be in progress."""
        assert not self.name, f"{name} while {self.name}"
        self.name, self._steps, self._answer, self._condition = name, steps, answer, lambda: True

    def advance(self) -> None:
        """Go on as far as possible."""
        while self._steps is not None and self._condition():
            try:
                self._condition = next(self._steps)
            except StopIteration:
                self._end(f"done: {self.name}")
            except ChangeFailed as error:
                self._end(str(error), failed=True)

    def give_up(self, why: str) -> None:
        """End the change in progress where it is."""
        if self._steps is not None:
            self._end(f"{self.name} was given up: {why}", failed=True)

    def _end(self, line: str, *, failed: bool = False) -> None:
        assert self._answer is not None
        answer, self._answer, self._steps, self.name = self._answer, None, None, ""
        answer.end(line, failed=failed)

    def restart(self, role: Role, drain_timeout_s: float, say: Callable[[str], None]) -> Waiting:
        """Replace every process of a role by a new one, one after the other."""
        for slot in self._slots.lasting(role):
            if role in SCALABLE:
                yield from self._add(role, 1, say)
                yield from self._retire([slot], drain_timeout_s, say)
            else:
                yield from self._renew(slot, say)

    def scale(
        self, wanted: Mapping[Role, int], drain_timeout_s: float, say: Callable[[str], None]
    ) -> Waiting:
        """Have so many processes of each role; those that were added last leave first."""
        for role, count in wanted.items():
            there = self._slots.lasting(role)
            if count > len(there):
                yield from self._add(role, count - len(there), say)
            elif count < len(there):
                by_age = sorted(there, key=lambda slot: slot.spawned_at)
                yield from self._retire(self._with_partners(by_age[count:]), drain_timeout_s, say)
            else:
                say(f"there are {count} of {role} already")

    def _with_partners(self, slots: Sequence[SlotRecord]) -> list[SlotRecord]:
        """Return these slots and those that come and go with them."""
        wanted = {(role, slot.index) for slot in slots for role in TOGETHER.get(slot.role, (slot.role,))}
        return [slot for slot in self._slots.own() if (slot.role, slot.index) in wanted]

    def _add(self, role: Role, count: int, say: Callable[[str], None]) -> Waiting:
        newcomers = []
        for _ in range(count):
            for slot in self._slots.vacancy(*TOGETHER.get(role, (role,))):
                self._fill(slot)
                slot.is_on_trial = True
                newcomers.append(slot)
        began = time.monotonic()
        say(f"starting {_names(newcomers)}")
        yield lambda: not any(slot.is_on_trial for slot in newcomers)
        failed = [slot for slot in newcomers if slot.is_retired]
        if failed:
            why = "; ".join(f"{slot.worker}: {slot.note}" for slot in failed)
            indexes = {slot.index for slot in failed}
            alone = [slot for slot in newcomers if slot.index in indexes and not slot.is_retired]
            if alone:
                yield from self._retire(alone, 0.0, say)
            raise ChangeFailed(f"a new process could not start ({why}); those that were there still serve")
        yield self._slots.is_known
        say(f"{_names(newcomers)} ready after {time.monotonic() - began:.1f} s")

    def _retire(self, leaving: Sequence[SlotRecord], timeout_s: float, say: Callable[[str], None]) -> Waiting:
        for slot in leaving:
            slot.is_retiring, slot.restart_at = True, None
        self._slots.is_changed = True
        say(f"retiring {_names(leaving)}")

        def staying() -> list[SlotRecord]:
            return [slot for slot in leaving if slot.process is not None]

        yield lambda: self._slots.is_known() or not staying()

        def busy() -> list[SlotRecord]:
            return [slot for slot in staying() if not (slot.is_drained or slot.role is Role.EXECUTOR)]

        for slot in busy():
            self._send(slot.role, slot.index, Drain())
        deadline = time.monotonic() + timeout_s
        yield lambda: not busy() or time.monotonic() > deadline
        late = busy()
        if late:
            say(f"{_names(late)} still had work after {timeout_s:g} s and had to leave it to others")
        self._stop(staying())
        yield lambda: not staying()
        self._slots.is_changed = True
        say(f"{_names(leaving)} left")

    def _renew(self, slot: SlotRecord, say: Callable[[str], None]) -> Waiting:
        before, began = slot.worker, time.monotonic()
        say(f"stopping {before}; its requests wait")
        self._stop([slot] if slot.process is not None else [])
        yield lambda: slot.worker != before and slot.state is SlotState.READY
        yield self._slots.is_known
        say(f"{slot.worker} ready after {time.monotonic() - began:.1f} s")

    def _stop(self, slots: Sequence[SlotRecord]) -> None:
        for slot in slots:
            slot.stopped_at = time.monotonic()
            self._send(slot.role, slot.index, Stop())


def _names(slots: Sequence[SlotRecord]) -> str:
    return ", ".join(str(slot.worker) for slot in slots)
