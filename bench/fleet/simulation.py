"""Simulate a fleet in virtual time: real routers, engines with real cores, and failures.

Each request arrives at one router: a random one (``any``), or one that depends on the ``conversation`` or on the shared prefix
(``beginning``). A router polls the load of the engines, as in production. Messages take no time.

A failed engine restarts with an empty cache after `ENGINE_RESTART_S`. Its requests resume on other engines with the tokens that
the clients have received. A failed router does not return: its clients send their requests to another router after
`CLIENT_RETRY_S`.
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
CLIENT_RETRY_S = 1.0
"""Time between the failure of a router and its clients' retries."""
ENGINE_RESTART_S = 30.0
"""Time between the failure of an engine and its restart."""
ARRIVAL, STEP_END, POLL, CLIENT_RETRY, ENGINE_FAILURE, ENGINE_RESTART, ROUTER_FAILURE = range(7)


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures, evenly distributed over the trace, and differences between engines."""

    num_deaths: int = 0
    """Number of engines that fail."""
    num_slow: int = 0
    """Number of engines that are slow from the start."""
    slowness: float = 4.0
    """Factor of their step time."""
    num_routers_lost: int = 0
    """Number of routers that fail."""
    num_scarce: int = 0
    """Number of engines with less KV memory."""
    scarcity: float = 0.25
    """Their KV memory as a share of the other engines'."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request on an engine."""

    index: int
    """Index in the trace."""
    router: int
    engine: int
    held: HeldPrefixes
    first_s: float = 0.0
    """Time of the first token; 0: none yet."""
    num_received: int = 0
    """Output tokens that the client has received."""


@dataclass(slots=True)
class Outcome:
    """Results of a simulation. Times of requests are lists in the order of the trace."""

    first_s: list[float]
    """Times of first tokens."""
    end_s: list[float]
    cached: list[int] = field(default_factory=list)
    """Prompt tokens of prefix cache hits since the measurement began, for each engine."""
    num_steps: int = 0
    num_preemptions: int = 0
    wall_s: float = 0.0
    """Duration of the simulation."""
    choosing_s: float = 0.0
    """CPU time of the routers."""


class Fleet:
    """Routers, engines, and a virtual clock."""

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        num_engines: int,
        policy: Routing,
        grain: int,
        num_routers: int = 1,
        spread: Spread = "any",
        is_random: bool = True,
        failures: Failures = Failures(),
        blind: bool = False,
    ) -> None:
        """is_random: see `make_router`. blind: routers get no figures on engine speed and KV memory."""
        logging.getLogger("quintet").setLevel(logging.ERROR)
        self._trace, self._grain, self._failures, self._blind = trace, grain, failures, blind
        self._now_s = 0.0
        num_affected = failures.num_deaths + failures.num_slow + failures.num_scarce
        self._affected = random.Random(1).sample(range(num_engines), num_affected)
        """Engines that fail, are slow, and have less KV memory, in this order."""
        scarce = set(self._affected[num_affected - failures.num_scarce :])
        small_machine = replace(machine, kv_tokens=int(machine.kv_tokens * failures.scarcity))
        self.engines = [
            SimulatedEngine(small_machine if index in scarce else machine, grain)
            for index in range(num_engines)
        ]
        self._is_up = [True] * num_engines
        self._requests_by_engine: list[dict[int, ActiveRequest]] = [{} for _ in range(num_engines)]
        self._routers: list[Servers | None] = [
            make_router(policy, num_engines, number, is_random=is_random, clock=lambda: self._now_s)
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
        """Time, sequence number, kind, and index of the engine, router or request."""
        self._num_events = 0
        self._requests: dict[int, ActiveRequest] = {}
        self._hashes = PrefixHashes(trace)
        self._attempts = [0] * len(trace)
        self.outcome = Outcome([0.0] * len(trace), [0.0] * len(trace))

    def run(self, measure_from: int = 0) -> Outcome:
        """Run the whole trace. Prefix cache hits count from the request ``measure_from`` on."""
        arrivals, outcome = self._trace.arrival_s.tolist(), self.outcome
        self._schedule_failures(arrivals[-1])
        self._schedule(0.0, POLL, 0)
        began_s, done = time.perf_counter(), 0
        handlers = (
            self._arrive, self._end_step, self._poll, self._arrive, self._fail_engine, self._restart_engine, self._fail_router,
        )  # fmt: skip
        events, num = self._events, len(arrivals)
        while done < num or self._requests:
            if done < num and arrivals[done] <= events[0][0]:
                if done == measure_from:
                    outcome.cached = [-engine.cached_tokens for engine in self.engines]
                self._now_s = arrivals[done]
                self._arrive(self._now_s, done)
                done += 1
                if done % 2000 == 0:
                    _print_progress(done, num, began_s)
                continue
            self._now_s, _, kind, target = heappop(events)
            handlers[kind](self._now_s, target)
        outcome.cached = [
            before + engine.cached_tokens for before, engine in zip(outcome.cached, self.engines, strict=True)
        ]
        outcome.num_steps = sum(engine.num_steps for engine in self.engines)
        outcome.num_preemptions = sum(engine.num_preemptions for engine in self.engines)
        outcome.wall_s = time.perf_counter() - began_s
        return outcome

    def _schedule(self, at_s: float, kind: int, target: int) -> None:
        self._num_events += 1
        heappush(self._events, (at_s, self._num_events, kind, target))

    def _schedule_failures(self, last_s: float) -> None:
        failures, affected = self._failures, self._affected
        for number in range(failures.num_deaths):
            self._schedule((number + 0.5) * last_s / failures.num_deaths, ENGINE_FAILURE, affected[number])
        for engine in affected[failures.num_deaths :][: failures.num_slow]:
            self.engines[engine].slowness = failures.slowness
        for number in range(failures.num_routers_lost):
            self._schedule(last_s * (number + 1) / (failures.num_routers_lost + 1), ROUTER_FAILURE, number)
        heapify(self._events)

    # --- requests ---------------------------------------------------------------------------------------------

    def _arrive(self, now_s: float, index: int) -> None:
        match self._spread:
            case "any":
                pick = self._rng.randrange(1 << 20)
            case "conversation":
                pick = int(self._trace.conversation[index])
            case "beginning":
                pick = int(self._trace.shared[index])
        router = pick % len(self._routers)
        while self._routers[router] is None:  # only requests of the failed router move
            pick = pick * 0x9E3779B1 + 1 & 0xFFFFFFFF
            router = (pick >> 8) % len(self._routers)
        self._send(now_s, index, router, 0)

    def _send(self, now_s: float, index: int, router_index: int, num_received: int) -> None:
        """Choose an engine and send it the request, with the number of output tokens that the client has received."""
        trace, router = self._trace, self._routers[router_index]
        assert router is not None
        num_prompt = int(trace.num_shared[index] + trace.num_own[index])
        began_s = time.process_time()
        summary = RequestSummary(
            self._hashes.hashes_of(index), num_prompt, True, str(trace.conversation[index])
        )
        while True:
            held = router.choose(summary, ())
            assert held is not None, "every engine is down"
            if self._is_up[held.server.index]:
                break
            held.release()
            held.server.set_trouble("no connection")
        self.outcome.choosing_s += time.process_time() - began_s
        if self._blind:
            held.num_before = 0
        engine_index = held.server.index
        request = ActiveRequest(
            index, router_index, engine_index, held, self.outcome.first_s[index], num_received
        )
        self._requests[index] = self._requests_by_engine[engine_index][index] = request
        engine = self.engines[engine_index]
        engine.admit(
            index,
            prompt_ids(trace, index, self._grain),
            int(trace.num_output[index]),
            num_received,
            self._attempts[index],
            now_s,
        )
        self._attempts[index] += 1
        if not engine.is_busy:
            self._begin_step(now_s, engine_index)

    def _begin_step(self, now_s: float, engine_index: int) -> None:
        end_s = self.engines[engine_index].begin_step(now_s)
        if end_s is not None:
            self._schedule(end_s, STEP_END, engine_index)

    def _end_step(self, now_s: float, engine_index: int) -> None:
        engine = self.engines[engine_index]
        if not engine.is_busy or not self._is_up[engine_index]:
            return
        events, outcome = engine.end_step(now_s), self.outcome
        for index, at_s in events.first_tokens:
            request = self._requests.get(index)
            if request is not None and not request.num_received:
                request.held.answer()
                if not outcome.first_s[index]:
                    outcome.first_s[index] = request.first_s = at_s
        for index in events.ended:
            request = self._requests_by_engine[engine_index].pop(index)
            del self._requests[index]
            request.held.release()
            outcome.end_s[index] = now_s
            self._num_ended += 1
            self._num_outputs += int(self._trace.num_output[index])
        self._begin_step(now_s, engine_index)

    # --- polls ------------------------------------------------------------------------------------------------

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
        self._schedule(now_s + POLL_S, POLL, 0)

    # --- failures ---------------------------------------------------------------------------------------------

    def _fail_engine(self, now_s: float, index: int) -> None:
        engine, interrupted = self.engines[index], list(self._requests_by_engine[index].values())
        for request in interrupted:
            request.num_received = engine.outputs_of(request.index)
            request.held.release()
            request.held.server.set_trouble("is lost")
        engine.restart()
        self._requests_by_engine[index].clear()
        self._is_up[index] = False
        self._schedule(now_s + ENGINE_RESTART_S, ENGINE_RESTART, index)
        for request in interrupted:
            self._send(now_s, request.index, request.router, request.num_received)

    def _restart_engine(self, now_s: float, index: int) -> None:
        self._is_up[index] = True

    def _fail_router(self, now_s: float, number: int) -> None:
        self._routers[number] = None
        for request in [request for request in self._requests.values() if request.router == number]:
            self.engines[request.engine].drop(request.index, now_s)
            del self._requests_by_engine[request.engine][request.index]
            self.outcome.first_s[request.index] = 0.0
            self._schedule(now_s + CLIENT_RETRY_S, CLIENT_RETRY, request.index)


def make_router(
    policy: Routing,
    num_engines: int,
    number: int = 0,
    *,
    is_random: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Servers:
    """Return a router with healthy servers only.

    is_random: with several routers, choose randomly among the servers with little load, instead of the least loaded one.
    """
    router = Servers(
        policy, random.Random(number), others_share=OTHERS_SHARE if is_random else 0, clock=clock
    )
    router.set_urls([f"http://10.{n >> 16}.{n >> 8 & 255}.{n & 255}:8000" for n in range(num_engines)], 1.0)
    for server in router:
        server.set_trouble("")
    return router


class PrefixHashes:
    """Prefix hashes of the requests, like those of `quintet.frontend.load_balancing.prefix_affinity.hash_prefixes`: equal for a
    common prefix.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def hashes_of(self, index: int) -> list[int]:
        """Return the hashes of a request. A partly shared piece belongs to the conversation."""
        trace = self._trace
        num_shared, num_own = int(trace.num_shared[index]), int(trace.num_own[index])
        num_pieces = min((num_shared + num_own) // PIECE_TOKENS, MAX_PIECES)
        num_shared_pieces = min(num_shared // PIECE_TOKENS, num_pieces)
        shared_seed = ((int(trace.shared[index]) + 1) << 12) * 0x9E3779B1
        own_seed = ((int(trace.conversation[index]) + 1) << 12) * 0x85EBCA6B + 0x5BD1E995
        hashes = [(shared_seed + piece * 0x27D4EB2F) & 0xFFFFFFFF for piece in range(num_shared_pieces)]
        hashes += [
            (own_seed + piece * 0x165667B1) & 0xFFFFFFFF for piece in range(num_shared_pieces, num_pieces)
        ]
        return hashes


def _print_progress(done: int, num: int, began_s: float) -> None:
    """Print a progress bar to stderr."""
    took_s = time.perf_counter() - began_s
    width = 30 * done // num
    left_s = took_s * (num - done) / done
    bar = "#" * width + "." * (30 - width)
    print(f"\r[{bar}] {done:,} of {num:,}, {left_s:.0f} s left ", end="", file=sys.stderr, flush=True)
    if done + 2000 > num:
        print(file=sys.stderr)
