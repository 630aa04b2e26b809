"""Simulate scheduling policies: the real core, a virtual clock, and a formula for the step time.

    python -m bench.schedule_sim [--machine 2-core] [--loads "32 clients"] [--policies fcfs latest] [--targets 0 150 250]

A step reads the weights once and multiplies each token with them. Reads and multiplications overlap in part, so a step takes
``hypot(weights, tokens * per_token + samples * per_sample)``, and a time for each pair of a token and a key. Machines differ in
these four numbers (`Machine`).

A closed-loop client sends its next request when the last one is complete. All requests of an offline batch arrive at the start.
Prints one row per load and policy. The simulation measures no time: the same command prints the same table on every machine.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from quintet.core.engine import Engine
from quintet.core.token_messages import StepMessages
from quintet.wire import codec
from quintet.wire.config import CacheConfig, ModelConfig, SchedulerConfig
from quintet.wire.kv_spec import full_layers
from quintet.wire.messages import Admit
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.step import Capacity, StepPlan, StepResult

BLOCK_SIZE, MAX_LEN, NUM_BLOCKS = 16, 4096, 8192
MESSAGE_DELAY_NS = 150_000
"""Time from a process sending a message to another process handling it."""
CLIENT_DELAY_NS = 2_000_000
"""Time from the last token of a response to the client's next request in the core: frontend, client and tokenizer."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Times of a simulated machine, in microseconds."""

    weights_us: float
    """Reading all weights once."""
    token_us: float
    """Multiplying one token with the layers' weights."""
    sample_us: float
    """Multiplying one token with the output layer, and sampling."""
    key_us: float
    """Attention of one token to one key, in all layers."""

    def step_ns(self, plan: StepPlan) -> int:
        """Return the computing time of a step, in nanoseconds."""
        starts, counts = codec.unpack_i32(plan.starts), codec.unpack_i32(plan.counts)
        compute_us = sum(counts) * self.token_us + sum(plan.samples) * self.sample_us
        keys = sum(count * start + count * count // 2 for start, count in zip(starts, counts, strict=True))
        return int(1000 * (math.hypot(self.weights_us, compute_us) + keys * self.key_us))


# A model of 0.36 G parameters in the layers and 0.14 G in the output layer, bf16.
MACHINES = {
    "2-core-fp32": Machine(
        weights_us=33_000, token_us=2700, sample_us=950, key_us=0.4
    ),  # 30 GB/s, 270 GFLOP/s
    "2-core": Machine(weights_us=31_000, token_us=1400, sample_us=530, key_us=0.2),  # 32 GB/s, 510 GFLOP/s
    "2-core-fast": Machine(
        weights_us=25_000, token_us=870, sample_us=330, key_us=0.15
    ),  # 40 GB/s, 820 GFLOP/s
    "64-core-amx": Machine(weights_us=3_300, token_us=18, sample_us=7, key_us=0.01),  # 300 GB/s, 40 TFLOP/s
}


@dataclass(slots=True)
class RequestTimes:
    """Times of a request's arrival and of its output tokens, in nanoseconds of virtual time."""

    num_outputs: int
    sent_ns: int
    token_ns: list[int] = field(default_factory=list)


Shape = tuple[int, int]
"""Prompt and output tokens of a request."""


_MODEL = ModelConfig(
    path="", tokenizer_path="", served_names=["m"], architecture="", dtype="bfloat16", vocab_size=32_000,
    max_model_len=MAX_LEN, eos_token_ids=[2], kv=full_layers(1, 1, 1, 2, BLOCK_SIZE),
)  # fmt: skip


class Simulation:
    """A real core, an executor that only advances the virtual clock, and clients."""

    def __init__(
        self, machine: Machine, scheduler: SchedulerConfig, shapes: Iterator[Shape], shared: int = 0
    ) -> None:
        self._machine = machine
        self._engine = Engine(_MODEL, CacheConfig(memory_bytes=0), scheduler)
        self._shapes = shapes
        self._shared = [3 + i * 7919 % 29_000 for i in range(shared)]
        self._rng = random.Random(0)
        self._ids = itertools.count()
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._order = itertools.count()
        self._executor_free_ns = 0
        self.requests: dict[int, RequestTimes] = {}
        self.num_steps = 0
        self._engine.capacity(Capacity(1, NUM_BLOCKS, BLOCK_SIZE, scheduler.max_num_seqs, MAX_LEN), 0)

    def run(self, num_clients: int) -> None:
        """Run ``num_clients`` clients until all requests are complete."""
        for _ in range(num_clients):
            self._schedule(0, self._send)
        while self._events:
            now, _, handler = heappop(self._events)
            handler(now)
            if not self._events or self._events[0][0] > now:
                self._plan(now)

    def _schedule(self, at_ns: int, handler: Callable[[int], None]) -> None:
        heappush(self._events, (at_ns, next(self._order), handler))

    def _send(self, now: int) -> None:
        shape = next(self._shapes, None)
        if shape is None:
            return
        num_prompt, num_outputs = shape
        request_id = next(self._ids)
        prompt = self._shared + [
            self._rng.randrange(3, 32_000) for _ in range(num_prompt - len(self._shared))
        ]
        params = SamplingParams(max_tokens=num_outputs, seed=request_id, ignore_eos=True)
        self.requests[request_id] = RequestTimes(num_outputs, now)
        self._engine.admit(Admit(request_id, codec.pack_i32(prompt), RequestSpec(params, now, 0), now), now)

    def _plan(self, now: int) -> None:
        while (plan := self._engine.plan(now)) is not None:
            self.num_steps += 1
            begin_ns = max(now + MESSAGE_DELAY_NS, self._executor_free_ns)
            compute_ns = self._machine.step_ns(plan)
            self._executor_free_ns = end_ns = begin_ns + compute_ns
            tokens = codec.pack_i32([5] * sum(plan.samples))
            result = StepResult(plan.step, end_ns, tokens, compute_ns=compute_ns)
            self._schedule(end_ns + MESSAGE_DELAY_NS, lambda at, result=result: self._commit(result, at))  # type: ignore[misc]

    def _commit(self, result: StepResult, now: int) -> None:
        effects: StepMessages = self._engine.commit(result, now)
        for _, tokens in effects.tokens:
            for request_id in codec.unpack_i64(tokens.request_ids):
                request = self.requests[request_id]
                request.token_ns.append(now)
                if len(request.token_ns) == request.num_outputs:
                    self._schedule(now + CLIENT_DELAY_NS, self._send)


def closed_loop(num_clients: int, waves: int = 8) -> list[Shape]:
    """Return ``waves`` requests for each client, with 256 prompt tokens and 64 output tokens."""
    return [(256, 64)] * (waves * num_clients)


def batch(num_requests: int, *, outputs: tuple[int, int] = (32, 128)) -> list[Shape]:
    """Return requests with 64 to 512 prompt tokens and ``outputs`` (minimum, maximum) output tokens."""
    rng = random.Random(0)
    return [(rng.randint(64, 512), rng.randint(*outputs)) for _ in range(num_requests)]


LOADS: dict[str, tuple[list[Shape], int, int]] = {
    "8 clients": (closed_loop(8), 8, 0),
    "32 clients": (closed_loop(32), 32, 0),
    "32 clients, twice": (closed_loop(32, waves=2), 32, 0),  # the load of bench.peers
    "batch of 16": (batch(16), 16, 0),
    "batch of 64": (batch(64), 64, 0),
    "batch, 80 out": (batch(64, outputs=(80, 80)), 64, 0),
    "32 share 1024": ([(1056, 16)] * 32, 32, 1024),
}
"""Name -> requests, number of concurrent requests, number of prompt tokens that all requests share."""


def figures(simulation: Simulation) -> list[float]:
    """Return the figures of a finished simulation: output tokens per second, TTFT and inter-token latency in milliseconds.

    TTFT: median, 99th percentile, mean. Inter-token latency: 99th percentile, maximum.
    """
    requests = list(simulation.requests.values())
    last_ns = max(request.token_ns[-1] for request in requests)
    ttft_ns = sorted(request.token_ns[0] - request.sent_ns for request in requests)
    inter_token_ns = sorted(b - a for request in requests for a, b in itertools.pairwise(request.token_ns))
    rate = sum(request.num_outputs for request in requests) / (last_ns * 1e-9)
    times_ns = [
        _percentile(ttft_ns, 50),
        _percentile(ttft_ns, 99),
        sum(ttft_ns) // len(ttft_ns),
        _percentile(inter_token_ns, 99),
        inter_token_ns[-1],
    ]
    return [rate, *(time_ns * 1e-6 for time_ns in times_ns)]


def _percentile(values: Sequence[int], percent: int) -> int:
    return values[min(len(values) - 1, len(values) * percent // 100)]


def main() -> None:
    """Simulate every load under every policy and print a table."""
    parser = argparse.ArgumentParser(description="Compare scheduling policies in a simulation.")
    parser.add_argument("--machine", choices=list(MACHINES), default="2-core")
    parser.add_argument("--loads", choices=list(LOADS), nargs="+", default=list(LOADS), metavar="LOAD")
    parser.add_argument(
        "--targets", type=int, nargs="+", default=[0, 100, 150, 200, 250, 300, 400], metavar="MS"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048], metavar="TOKENS")
    parser.add_argument("--depths", type=int, nargs="+", default=[2])
    parser.add_argument("--policies", nargs="+", default=["fcfs", "longest", "latest"], metavar="POLICY")
    arguments = parser.parse_args()
    heads = ["policy", "target", "budget", "depth", "tok/s", "TTFT p50", "p99", "mean", "ITL p99", "max"]
    print(f"{'load':>20}", *(f"{head:>8}" for head in heads))
    settings = (arguments.policies, arguments.targets, arguments.budgets, arguments.depths)
    for load, policy, target_ms, budget, depth in itertools.product(arguments.loads, *settings):
        shapes, num_clients, num_shared = LOADS[load]
        scheduler = SchedulerConfig(
            max_num_seqs=min(256, budget),
            max_num_batched_tokens=budget,
            policy=policy,
            step_target_ms=target_ms,
            max_steps_in_flight=depth,
        )
        simulation = Simulation(MACHINES[arguments.machine], scheduler, iter(shapes), num_shared)
        simulation.run(num_clients)
        row = [policy, target_ms, budget, depth, *(round(figure) for figure in figures(simulation))]
        print(f"{load:>20}", *(f"{figure:>8}" for figure in row))


if __name__ == "__main__":
    main()
