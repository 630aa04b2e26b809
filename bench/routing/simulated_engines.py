"""Simulate the long-prompt traces of `bench.routing.policies`, and compare routing policies with an ideal one.

    python -m bench.routing.simulated_engines [--step-ms 10] [--seeds 6] [--duration 60]

An engine prefills prompts in order of arrival, with a fixed token budget per step that decoding requests share, as the core does.
The policies are the real ones (`quintet.frontend.load_balancing.load_balancer.choose`), with the data of a frontend. ``exact``
knows the remaining tokens of each engine and takes the minimum: equivalent to one queue for all engines.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles

from bench.routing.policies import NUM_ENGINES, OUTPUT_LEN, SHAPES, draw_lengths
from quintet.frontend.load_balancing.load_balancer import MEAN_OVER, Candidate, choose
from quintet.frontend.load_balancing.prefix_affinity import PIECE_TOKENS
from quintet.wire.config import Routing

MAX_BATCHED_TOKENS = 128
TRACES = ("rare", "mixed")


@dataclass(slots=True, eq=False)
class Request:
    """A request: its prompt length, remaining prompt tokens, and sampled tokens."""

    arrival_s: float
    size: int
    remaining: int
    num_sampled: int = 0


@dataclass(slots=True)
class SimulatedEngine:
    """Queues of a simulated engine."""

    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    num_queued: int = 0
    is_busy: bool = False

    @property
    def work(self) -> int:
        """Remaining prompt tokens of all requests."""
        return sum(request.remaining for request in (*self.waiting, *self.running))

    def plan(self) -> list[tuple[Request, int]]:
        """Return the tokens of each request in the next step."""
        step = [(request, 0) for request in self.running if not request.remaining]
        budget = MAX_BATCHED_TOKENS - len(step)
        for request in self.running:
            if request.remaining and budget > 0:
                step.append((request, min(budget, request.remaining)))
                budget -= step[-1][1]
        while self.waiting and budget > 0:
            request = self.waiting.popleft()
            self.running.append(request)
            step.append((request, min(budget, request.remaining)))
            budget -= step[-1][1]
        return step


Choose = Callable[[list[SimulatedEngine], int, int, float], int]


def by_policy(policy: Routing, engines: list[SimulatedEngine], size: int, turn: int, mean_size: float) -> int:
    """Return the engine that a frontend chooses with this policy. mean_size: mean prompt length so far."""
    known = [
        Candidate(index, each.num_queued, len(each.waiting) + len(each.running))
        for index, each in enumerate(engines)
    ]
    return choose(known, policy, turn, "", size, mean_size).index


def by_remaining_tokens(engines: list[SimulatedEngine], size: int, turn: int, mean_size: float) -> int:
    """Return the engine with the fewest remaining prompt tokens."""
    return min(range(len(engines)), key=lambda index: (engines[index].work, (index + turn) % len(engines)))


def simulate(counts: list[int], arrivals_s: list[float], choice: Choose, step_s: float) -> list[float]:
    """Return the time to first token of each request, in seconds."""
    engines = [SimulatedEngine() for _ in range(NUM_ENGINES)]
    requests = [Request(at, count, count) for at, count in zip(arrivals_s, counts, strict=True)]
    events: list[tuple[float, int, int]] = [(each.arrival_s, 0, at) for at, each in enumerate(requests)]
    heapq.heapify(events)
    plans: dict[int, list[tuple[Request, int]]] = {}
    ttfts_s: list[float] = []
    mean_size, turn = 0.0, 0

    def begin(index: int, now_s: float) -> None:
        plans[index] = engines[index].plan()
        engines[index].is_busy = bool(plans[index])
        if plans[index]:
            heapq.heappush(events, (now_s + step_s, 1, index))

    while events:
        now_s, kind, at = heapq.heappop(events)
        if kind == 0:
            request, turn = requests[at], turn + 1
            known = max(PIECE_TOKENS, mean_size) if turn > MEAN_OVER // 4 else 0.0
            index = choice(engines, request.size, turn, known)
            mean_size += (request.size - mean_size) / min(turn, MEAN_OVER)
            engines[index].waiting.append(request)
            engines[index].num_queued += request.size
            if not engines[index].is_busy:
                begin(index, now_s)
            continue
        engine = engines[at]
        for request, count in plans[at]:
            request.remaining -= count
            if request.remaining:
                continue
            if not request.num_sampled:
                ttfts_s.append(now_s - request.arrival_s)
                engine.num_queued -= request.size
            request.num_sampled += 1
            if request.num_sampled == OUTPUT_LEN:
                engine.running.remove(request)
        begin(at, now_s)
    return ttfts_s


CHOICES: dict[str, Choose] = {
    "round-robin": partial(by_policy, "round-robin"),
    "prefix": partial(by_policy, "prefix"),
    "exact": by_remaining_tokens,
}


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--duration", type=float, default=60.0, metavar="S")
    arguments = parser.parse_args()
    shape = dataclasses.replace(SHAPES["mock"], duration_s=arguments.duration)
    print("| trace | policy | p50, ms | p99, ms | p99 / that of round-robin |\n|---|---|---|---|---|")
    for trace in TRACES:
        p99: dict[str, list[float]] = {}
        for name, choice in CHOICES.items():
            runs = [
                simulate(*draw_lengths(shape, trace, seed), choice, arguments.step_ms / 1e3)
                for seed in range(arguments.seeds)
            ]
            p99[name] = [1e3 * quantiles(run, n=100)[98] for run in runs]
            ratios = [a / b for a, b in zip(p99[name], p99["round-robin"], strict=True)]
            p50 = 1e3 * median(median(run) for run in runs)
            print(f"| {trace} | {name} | {p50:.0f} | {median(p99[name]):.0f} | {median(ratios):.2f} |")


if __name__ == "__main__":
    main()
