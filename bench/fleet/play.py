"""A trace played to a fleet in virtual time: routers as they are, engines with real cores, and what breaks meanwhile.

A request comes to one of the routers: to ``any``, drawn for each, or to the same one for all of a ``conversation``, or for all
that share a ``beginning``. A router learns of others' requests where it would, from an engine's figures, once a poll. Messages
take no time. An engine that dies is back, empty, after a while; its requests resume on other engines with the tokens that the
clients have. A router that dies stays away: clients of its requests retry on another one, from the start, a second later.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Literal

from bench.fleet.engine import Machine, SimulatedEngine, prompt_ids
from bench.fleet.traces import Trace
from quintet.deploy.router.request_summary import RequestSummary
from quintet.deploy.router.servers import OTHERS_SHARE, HeldPrefixes, Servers
from quintet.frontend.load_balancing.prefix_affinity import MAX_PIECES, PIECE_TOKENS
from quintet.wire.config import Routing

Spread = Literal["any", "conversation", "beginning"]

POLL_S = 1.0
AGAIN_S = 1.0
"""From the loss of a router to its clients' asking another one."""
DOWN_S = 30.0
"""From an engine's death to its successor's being ready."""
ARRIVE, STEP_ENDS, POLL, ASK_AGAIN, DIE, RISE, LOSE_ROUTER = range(7)


@dataclass(frozen=True, slots=True)
class Troubles:
    """Failures, evenly over the trace."""

    num_deaths: int = 0
    """Engines that die."""
    num_slow: int = 0
    """Engines that are slow from the first."""
    slowness: float = 4.0
    num_routers_lost: int = 0
    num_scarce: int = 0
    """Engines that have little KV memory from the first."""
    scarcity: float = 0.25
    """Capacity as a share of the others'."""


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way."""

    at: int
    router: int
    engine: int
    held: HeldPrefixes
    first_s: float = 0.0
    """0: not yet."""
    num_received: int = 0
    """Output tokens that its client has."""


@dataclass(slots=True)
class Outcome:
    """Outcome of all requests, a place for each."""

    first_s: list[float]
    """Time of the first token."""
    end_s: list[float]
    cached: list[int] = field(default_factory=list)
    """Of each engine, prompt tokens that were found, at the end and (negative) when measuring began."""
    num_steps: int = 0
    num_preemptions: int = 0
    wall_s: float = 0.0
    choosing_s: float = 0.0
    """Of the processor, in the routers."""


class Fleet:
    """Routers, engines, and the clock."""

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        num_engines: int,
        policy: Routing,
        grain: int,
        num_routers: int = 1,
        spread: Spread = "any",
        drawn: bool = True,
        troubles: Troubles = Troubles(),
        blind: bool = False,
    ) -> None:
        """drawn: see `make_router`. blind: whether routers learn nothing of paces and KV memory."""
        logging.getLogger("quintet").setLevel(logging.ERROR)
        self._trace, self._grain, self._troubles, self._blind = trace, grain, troubles, blind
        self._now_s = 0.0
        num_hurt = troubles.num_deaths + troubles.num_slow + troubles.num_scarce
        self._hurt = random.Random(1).sample(range(num_engines), num_hurt)
        """Those that die, are slow, and have little KV memory, in this order."""
        scarce = set(self._hurt[num_hurt - troubles.num_scarce :])
        little = replace(machine, kv_tokens=int(machine.kv_tokens * troubles.scarcity))
        self.engines = [
            SimulatedEngine(little if index in scarce else machine, grain) for index in range(num_engines)
        ]
        self._is_up = [True] * num_engines
        self._at_engine: list[dict[int, Flight]] = [{} for _ in range(num_engines)]
        self._routers: list[Servers | None] = [
            make_router(policy, num_engines, number, drawn=drawn, clock=lambda: self._now_s)
            for number in range(num_routers)
        ]
        if blind:
            for router in self._routers:
                for server, engine in zip(router or (), self.engines, strict=True):
                    server.prefixes.max_hashes = engine.kv_tokens // PIECE_TOKENS
        self._num_ended = self._num_outputs = 0
        self._spread = spread
        self._rng = random.Random(0)
        self._events: list[tuple[float, int, int, int]] = []
        """Time, number, kind, subject."""
        self._num_events = 0
        self._flights: dict[int, Flight] = {}
        self._names = Names(trace)
        self._attempts = [0] * len(trace)
        self.outcome = Outcome([0.0] * len(trace), [0.0] * len(trace))

    def play(self, measure_from: int = 0) -> Outcome:
        """Play the whole trace; what caches find is counted from the request ``measure_from`` on."""
        arrivals, outcome = self._trace.arrival_s.tolist(), self.outcome
        self._plan_troubles(arrivals[-1])
        self._at(0.0, POLL, 0)
        began_s, done = time.perf_counter(), 0
        acts = (self._arrive, self._end_step, self._poll, self._ask_again, self._die, self._rise, self._lose_router)  # fmt: skip
        events, num = self._events, len(arrivals)
        while done < num or self._flights:
            if done < num and arrivals[done] <= events[0][0]:
                if done == measure_from:
                    outcome.cached = [-engine.cached_tokens for engine in self.engines]
                self._now_s = arrivals[done]
                self._arrive(self._now_s, done)
                done += 1
                if done % 2000 == 0:
                    _show(done, num, began_s)
                continue
            self._now_s, _, kind, of = heappop(events)
            acts[kind](self._now_s, of)
        outcome.cached = [
            before + engine.cached_tokens for before, engine in zip(outcome.cached, self.engines, strict=True)
        ]
        outcome.num_steps = sum(engine.num_steps for engine in self.engines)
        outcome.num_preemptions = sum(engine.num_preemptions for engine in self.engines)
        outcome.wall_s = time.perf_counter() - began_s
        return outcome

    def _at(self, when_s: float, kind: int, of: int) -> None:
        self._num_events += 1
        heappush(self._events, (when_s, self._num_events, kind, of))

    def _plan_troubles(self, last_s: float) -> None:
        troubles, hurt = self._troubles, self._hurt
        for number in range(troubles.num_deaths):
            self._at((number + 0.5) * last_s / troubles.num_deaths, DIE, hurt[number])
        for engine in hurt[troubles.num_deaths :][: troubles.num_slow]:
            self.engines[engine].slowness = troubles.slowness
        for number in range(troubles.num_routers_lost):
            self._at(last_s * (number + 1) / (troubles.num_routers_lost + 1), LOSE_ROUTER, number)
        heapify(self._events)

    # --- a request's way --------------------------------------------------------------------------------------

    def _arrive(self, now_s: float, at: int) -> None:
        match self._spread:
            case "any":
                pick = self._rng.randrange(1 << 20)
            case "conversation":
                pick = int(self._trace.conversation[at])
            case "beginning":
                pick = int(self._trace.shared[at])
        router = pick % len(self._routers)
        while self._routers[router] is None:  # only what came to the one that is lost goes elsewhere
            pick = pick * 0x9E3779B1 + 1 & 0xFFFFFFFF
            router = (pick >> 8) % len(self._routers)
        self._send(now_s, at, router, 0)

    def _send(self, now_s: float, at: int, router_at: int, num_received: int) -> None:
        """Choose an engine and give it the request, of which its client has so many tokens."""
        trace, router = self._trace, self._routers[router_at]
        assert router is not None
        num_prompt = int(trace.num_shared[at] + trace.num_own[at])
        began_s = time.process_time()
        asked = RequestSummary(self._names.of(at), num_prompt, True, str(trace.conversation[at]))
        while True:
            held = router.choose(asked, ())
            assert held is not None, "every engine is down"
            if self._is_up[held.server.index]:
                break
            held.release()
            held.server.set_trouble("no connection")
        self.outcome.choosing_s += time.process_time() - began_s
        if self._blind:
            held.num_before = 0
        index = held.server.index
        flight = Flight(at, router_at, index, held, self.outcome.first_s[at], num_received)
        self._flights[at] = self._at_engine[index][at] = flight
        engine = self.engines[index]
        engine.admit(
            at,
            prompt_ids(trace, at, self._grain),
            int(trace.num_output[at]),
            num_received,
            self._attempts[at],
            now_s,
        )
        self._attempts[at] += 1
        if not engine.is_busy:
            self._begin_step(now_s, index)

    def _begin_step(self, now_s: float, index: int) -> None:
        end_s = self.engines[index].begin(now_s)
        if end_s is not None:
            self._at(end_s, STEP_ENDS, index)

    def _end_step(self, now_s: float, index: int) -> None:
        engine = self.engines[index]
        if not engine.is_busy or not self._is_up[index]:
            return
        done, outcome = engine.end(now_s), self.outcome
        for at, when_s in done.firsts:
            flight = self._flights.get(at)
            if flight is not None and not flight.num_received:
                flight.held.answer()
                if not outcome.first_s[at]:
                    outcome.first_s[at] = flight.first_s = when_s
        for at in done.ended:
            flight = self._at_engine[index].pop(at)
            del self._flights[at]
            flight.held.release()
            outcome.end_s[at] = now_s
            self._num_ended += 1
            self._num_outputs += int(self._trace.num_output[at])
        self._begin_step(now_s, index)

    # --- what routers learn -----------------------------------------------------------------------------------

    def _poll(self, now_s: float, _: int) -> None:
        running = [engine.num_running for engine in self.engines]
        waiting = [engine.num_waiting for engine in self.engines]
        usages = [engine.kv_usage for engine in self.engines]
        num_outputs = self._num_outputs // max(1, self._num_ended)
        for router in self._routers:
            if router is None:
                continue
            for server in router:
                index = server.index
                server.set_trouble("" if self._is_up[index] else "does not answer")
                if self._is_up[index]:
                    kv_tokens = 0 if self._blind else self.engines[index].kv_tokens
                    had = set(server.holds)
                    server.update_load(
                        running[index], waiting[index], had, kv_tokens, usages[index], num_outputs
                    )
        self._at(now_s + POLL_S, POLL, 0)

    # --- what breaks ------------------------------------------------------------------------------------------

    def _die(self, now_s: float, index: int) -> None:
        engine, lost = self.engines[index], list(self._at_engine[index].values())
        for flight in lost:
            flight.num_received = engine.outputs_of(flight.at)
            flight.held.release()
            flight.held.server.set_trouble("is lost")
        engine.die()
        self._at_engine[index].clear()
        self._is_up[index] = False
        self._at(now_s + DOWN_S, RISE, index)
        for flight in lost:
            self._send(now_s, flight.at, flight.router, flight.num_received)

    def _rise(self, now_s: float, index: int) -> None:
        self._is_up[index] = True

    def _lose_router(self, now_s: float, number: int) -> None:
        self._routers[number] = None
        for flight in [flight for flight in self._flights.values() if flight.router == number]:
            self.engines[flight.engine].drop(flight.at, now_s)
            del self._at_engine[flight.engine][flight.at]
            self.outcome.first_s[flight.at] = 0.0
            self._at(now_s + AGAIN_S, ASK_AGAIN, flight.at)

    def _ask_again(self, now_s: float, at: int) -> None:
        self._arrive(now_s, at)


def make_router(
    policy: Routing,
    num_engines: int,
    number: int = 0,
    *,
    drawn: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Servers:
    """Return a router that finds all its servers well.

    drawn: whether it draws among those that seem idle where others send as well, else takes the least loaded of all.
    """
    router = Servers(policy, random.Random(number), others_share=OTHERS_SHARE if drawn else 0, clock=clock)
    router.set_urls([f"http://10.{n >> 16}.{n >> 8 & 255}.{n & 255}:8000" for n in range(num_engines)], 1.0)
    for server in router:
        server.set_trouble("")
    return router


class Names:
    """The names of beginnings, as `quintet.frontend.load_balancing.prefix_affinity.hash_prefixes` gives them: equal where
    prompts begin alike.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def of(self, at: int) -> list[int]:
        """Return those of a request. A piece that is partly shared is its conversation's."""
        trace = self._trace
        num_shared, num_own = int(trace.num_shared[at]), int(trace.num_own[at])
        num_pieces = min((num_shared + num_own) // PIECE_TOKENS, MAX_PIECES)
        num_common = min(num_shared // PIECE_TOKENS, num_pieces)
        common = ((int(trace.shared[at]) + 1) << 12) * 0x9E3779B1
        own = ((int(trace.conversation[at]) + 1) << 12) * 0x85EBCA6B + 0x5BD1E995
        names = [(common + piece * 0x27D4EB2F) & 0xFFFFFFFF for piece in range(num_common)]
        names += [(own + piece * 0x165667B1) & 0xFFFFFFFF for piece in range(num_common, num_pieces)]
        return names


def _show(done: int, num: int, began_s: float) -> None:
    """Draw the progress bar."""
    took_s = time.perf_counter() - began_s
    width = 30 * done // num
    left_s = took_s * (num - done) / done
    bar = "#" * width + "." * (30 - width)
    print(f"\r[{bar}] {done:,} of {num:,}, {left_s:.0f} s left ", end="", file=sys.stderr, flush=True)
    if done + 2000 > num:
        print(file=sys.stderr)
