"""Which worker gets the next piece of work, and which workers were lost.

Knows the topology and this process's own outstanding work; knows nothing of requests or HTTP. What a frontend knows of engines
beyond that is kept in ``engines.py``; here is only the choice among them, a function of nothing but its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from quintet.wire.config import Routing
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import ProcessSlot, SlotState, Topology

SERVING_ROLES = (Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
"""Roles that must all be there for a request to be answered."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of an engine that could take a request."""

    index: int
    num_queued: int = 0
    """Prompt tokens that it has not begun to compute."""
    num_open: int = 0
    """Choices that it is to answer, begun or not."""
    num_cached: int = 0
    """Tokens of this request's prompt that it should have computed before, about."""
    used: int = 0
    """When these were last used, by the engine's own count."""
    name: str = ""
    """What it is called everywhere, where its index is not the same everywhere."""
    slowness: float = 1.0
    """How many times as long as engines usually do it takes, measured; 1 where nothing is known."""
    kv_free: int | None = None
    """Tokens that its KV memory has room for; None where nothing is known."""
    is_full: bool = False
    """Whether what it computes takes the place of beginnings that it has, as far as those are known."""


class EngineChoice(msgspec.Struct, frozen=True):
    """An engine, and why it."""

    index: int
    reason: str
    num_cached: int = 0
    used: int = 0


RUNNING_TOKENS = 16
"""What a choice that is being answered delays a prompt by, in tokens of prompts: each step computes both."""

NEXT_WEIGHT = 0.1
"""What the delay of those who come next counts, where they come as densely as engines that never rest would compute them."""
LONG = 12
"""So many times what is usual is long. Both are from a simulation: with more, two long prompts block two engines; with less, long
prompts wait for each other where they are common."""
DISPLACED = 0.5
"""What a token that takes the place of another's counts besides its own: some time somebody has that one computed again. From two
real cores in virtual time (`python -m bench.routing_shared`): with nothing, engines that could hold all beginnings between them
drive out each other's."""
MOST_SLOWNESS = 16.0
"""Nobody counts as slower than that, or as faster than its inverse: whoever is, is measured again some time."""


def choose(
    engines: Sequence[Candidate],
    policy: Routing,
    turn: int,
    session: str = "",
    num_tokens: int = 0,
    usual: float = 0.0,
    num_kept: int = 0,
) -> EngineChoice:
    """Choose the engine of one request.

    ``turn`` counts the choices made: who is equal takes turns. ``session``: what the requests of one conversation have in
    common; "" where nothing does. ``num_tokens``: of its prompt, of which prompts have ``usual`` to compute (0: not known).
    ``num_kept``: tokens that KV memory has to hold for it, with its answer, where nothing of it is there (0: not known).

    round-robin  who has the turn
    load         the least to do, there and then everywhere: see `_delay`; of engines whose KV memory has room, while there are
    prefix       the same, less what the engine need not compute of this prompt
    session      always the same for one session (Thaler and Ravishankar, highest random weight, 1998), else by load
    """
    ordered = sorted(engines, key=lambda engine: engine.index)
    start = turn % len(ordered)
    in_turn = ordered[start:] + ordered[:start]
    if policy == "round-robin":
        best, reason = in_turn[0], "its turn"
    elif policy == "session" and session:
        best, reason = (
            max(ordered, key=lambda engine: _weight(session, engine.name or engine.index)),
            "its session",
        )
    else:
        saves = policy == "prefix"
        roomy = [e for e in in_turn if has_room(e.kv_free, num_kept, e.num_cached if saves else 0)] or in_turn
        least = sorted(map(_load, in_turn))[:2] if usual and num_tokens >= LONG * usual else []
        best = min(roomy, key=lambda engine: _delay(engine, least, saves, num_tokens, usual))
        reason = f"{best.num_queued} queued tokens, {best.num_open} open"
        reason += f", {best.num_cached} cached" if policy == "prefix" else ""
        slowness = _slowness(best)
        reason += f", takes {slowness:.2g} times as long" if slowness != 1 else ""
        num_full = len(in_turn) - len(roomy)
        reason += f", has room as {num_full} of {len(in_turn)} have not" if num_full else ""
    return EngineChoice(best.index, reason, best.num_cached, best.used)


def has_room(kv_free: int | None, num_kept: int, num_shared: int) -> bool:
    """Whether KV memory holds a request of so many tokens, of which some are there already, or nobody knows (None)."""
    return kv_free is None or kv_free >= num_kept - num_shared


def _slowness(engine: Candidate) -> float:
    """Return how many times as long it takes; 1 where that was measured to be nothing that can be."""
    slowness = engine.slowness
    if not (math.isfinite(slowness) and slowness > 0):
        return 1.0
    return min(max(slowness, 1 / MOST_SLOWNESS), MOST_SLOWNESS)


def _load(engine: Candidate) -> float:
    """Return what it has to do, in tokens that a usual engine would compute in the same time."""
    return _slowness(engine) * (engine.num_queued + RUNNING_TOKENS * engine.num_open)


def _delay(engine: Candidate, least: Sequence[float], saves: bool, num_tokens: int, usual: float) -> float:
    """Return what stands before the request's first token, less what is saved, and what it does to those who come next.

    In tokens of prompts that a usual engine computes: one that takes twice as long has twice as many to do, and twice as many of
    this prompt. ``least``: what the two engines have to do that have the least, where the prompt may be long. Who
    comes next finds the engine with the least to do; while none is idle, he waits. So a prompt that would occupy the last idle
    engine delays, for as long as it does, everybody: of ``usual`` tokens each, the squared time over twice that. That is why a
    second long prompt stands behind the first where long ones are rare.
    """
    saved = engine.num_cached if saves else 0
    num_new = max(0, num_tokens - saved)
    slowness, load = _slowness(engine), _load(engine)
    own = load - saved + (slowness - 1) * num_new
    if saves and engine.is_full:
        own += DISPLACED * num_new
    if len(least) < 2 or num_new < LONG * usual:
        return own
    least_elsewhere = least[1] if load == least[0] else least[0]
    all_busy = min(least_elsewhere, load + slowness * num_new)
    return own + NEXT_WEIGHT * all_busy * all_busy / (2 * usual)


def _weight(session: str, engine: str | int) -> bytes:
    """Return a number that looks drawn by chance, the same in every process."""
    return blake2b(f"{engine} {session}".encode(errors="surrogatepass"), digest_size=8).digest()


class Workers:
    """The newest topology, and how much this process has outstanding at each worker."""

    def __init__(self, me: WorkerId) -> None:
        self.me = me
        self._alive: dict[tuple[Role, int], WorkerId] = {}
        self._load: dict[tuple[Role, int], int] = {}
        self.topology = Topology(0, [])
        self._engines: list[int] = []
        self._able: dict[Role, list[int]] = {}
        """Whom `pick` chooses among."""
        self.num_frontends = 1
        self.ever_ready: set[Role] = set()
        """Roles of which a worker was ready at least once: what is missing of them now is being replaced."""

    def follow(self, topology: Topology) -> list[WorkerId]:
        """Take over a newer topology and return the workers that answer no more; an older one changes nothing."""
        if topology.version <= self.topology.version:
            return []
        self.topology = topology
        self.ever_ready |= {
            slot.worker.role for slot in topology.slots if slot.was_ready or slot.state is SlotState.READY
        }
        alive = {
            (slot.worker.role, slot.worker.index): slot.worker
            for slot in topology.slots
            if slot.state is not SlotState.DOWN
        }
        lost = [worker for key, worker in self._alive.items() if alive.get(key) != worker]
        self._alive = alive
        self._engines = self._usable_engines()
        self.num_frontends = sum(
            slot.worker.role is Role.FRONTEND and slot.state is SlotState.READY for slot in topology.slots
        )
        self._able = {role: self._able_of(role) for role in SERVING_ROLES}
        return lost

    def pick(self, role: Role) -> int | None:
        """Return the index of the least loaded worker that can take work, or None when there is none.

        A stalled worker is chosen only when no other is there. Ties are broken differently by each frontend, so that
        several of them do not all start with worker 0.
        """
        indexes = self._able.get(role)
        if not indexes:
            return None
        if len(indexes) == 1:
            return indexes[0]
        return min(indexes, key=lambda index: self._weight(role, index, len(indexes)))

    def _able_of(self, role: Role) -> list[int]:
        """Return the workers of a role that are ready; where none is, the stalled ones."""
        for state in (SlotState.READY, SlotState.STALLED):
            indexes = [
                s.worker.index for s in self.topology.slots if s.worker.role is role and s.state is state
            ]
            if indexes:
                return indexes
        return []

    def whole_engines(self) -> list[int]:
        """Return the engines whose core and executor are both well."""
        well = {
            (slot.worker.role, slot.worker.index)
            for slot in self.topology.slots
            if slot.state is SlotState.READY
        }
        return [index for role, index in well if role is Role.CORE and (Role.EXECUTOR, index) in well]

    def engines_without_executor(self) -> frozenset[int]:
        """Return the engines whose executor is down or not ready yet."""
        absent = (SlotState.STARTING, SlotState.DOWN)
        return frozenset(
            slot.worker.index
            for slot in self.topology.slots
            if slot.worker.role is Role.EXECUTOR and slot.state in absent and not slot.retired
        )

    def engines(self) -> list[int]:
        """Return the engines that may be given requests: whole ones, else whoever will be whole before others."""
        return self._engines

    def _usable_engines(self) -> list[int]:
        return self.whole_engines() or self._able_of(Role.CORE)

    def cores(self) -> list[int]:
        """Return the engines whose core lives, whether it takes requests or not."""
        return [index for role, index in self._alive if role is Role.CORE]

    def _weight(self, role: Role, index: int, count: int) -> tuple[int, int]:
        return self._load.get((role, index), 0), (index - self.me.index) % count

    def epoch(self, role: Role, index: int) -> int:
        """Return the epoch of the worker at this slot; 0 when nobody is there."""
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
        ready = {slot.worker.role for slot in self.topology.slots if slot.state is SlotState.READY}
        if Role.CORE in ready and not self.whole_engines():
            ready.discard(Role.EXECUTOR)  # those that are ready belong to other cores
        return [role for role in SERVING_ROLES if role not in ready]

    def troubled(self) -> list[ProcessSlot]:
        """Return the slots that are stalled or down, but for those that nobody shall fill."""
        troubles = {SlotState.STALLED, SlotState.DOWN}
        return [s for s in self.topology.slots if s.state in troubles and not s.retired]
