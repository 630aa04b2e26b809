"""Simulate the ``shared`` trace of `bench.routing.policies` in virtual time, with two real cores and the real load balancer.

    python -m bench.routing.simulated_cores [--seeds 10] [--orders 4] [--displaced 0 0.5 1 2] [--save FILE]

Each client sends one request at a time. Step times are those of a formula, multiplied by random noise, so replays of a trace
differ in their order. The memory of both engines together holds little more than all prefixes: a prefix cached by both evicts
another one. ``--displaced``: cost of an evicted token (`quintet.frontend.load_balancing.load_balancer.EVICTION_COST`). Prints
shares of the ideal hit rate, in which each prefix is computed once.
"""

from __future__ import annotations

import argparse
import datetime
import random
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path
from statistics import median

import msgspec

from bench.fleet.engine import Machine, SimulatedEngine
from bench.overhead.run import Machine as Host
from bench.overhead.run import _commit, machine
from bench.routing.policies import CLIENTS, NUM_ENGINES, OUTPUT_LEN, SHAPES, random_tokens
from quintet.frontend.load_balancing import load_balancer
from quintet.frontend.load_balancing.engine_selector import EngineSelector
from quintet.frontend.load_balancing.load_ledger import LoadLedger
from quintet.frontend.load_balancing.workers import Workers
from quintet.frontend.streams import Mailbox, Stream
from quintet.wire.codec import pack_i32
from quintet.wire.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    ModelConfig,
    ProcessesConfig,
    SchedulerConfig,
)
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_spec import full_layers
from quintet.wire.messages import Started, Submit, TokenPrompt
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.supervision import ProcessSlot, SlotState, Topology

SHAPE = SHAPES["model"]
SUFFIX_TOKENS = 16
"""Tokens of a prompt after its shared prefix."""
KV_TOKENS = int(SHAPE.prefix * SHAPE.num_groups * 0.55) + CLIENTS * 64
"""KV memory of one engine, as in `bench.routing.policies`."""
CPU = Machine(weights_us=1_500, token_us=40, key_us=0.01, pair_us=0.005, kv_tokens=KV_TOKENS)
"""A prefill takes about 35 ms, as with the embedded model in `bench.routing.policies`."""
JITTER = 0.3
"""Standard deviation of the logarithm of a step's noise factor."""
PAUSE_S = 0.0005
"""Mean time between the end of a response and the client's next request."""
FRONTEND = WorkerId(Role.FRONTEND, 0, 1)


class Figures(msgspec.Struct):
    """Results for one cost of an evicted token."""

    displaced: float
    hit_rates: list[float]
    """Shares of the ideal hit rate, for each trace and order."""


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    commit: str
    machine: Host
    command: str
    figures: list[Figures]


def prompts_of(seed: int) -> list[bytes]:
    """Return the prompts of a trace, in order, as packed token ids."""
    rng = random.Random(seed)
    prefixes = [random_tokens(rng, SHAPE.prefix) for _ in range(SHAPE.num_groups)]
    prompts = [
        [*each, *random_tokens(rng, SUFFIX_TOKENS)]
        for each in prefixes
        for _ in range(SHAPE.requests_per_group)
    ]
    rng.shuffle(prompts)
    return [pack_i32(prompt) for prompt in prompts]


class Simulation:
    """Simulation of one trace with one random order."""

    def __init__(self, seed: int, order: int) -> None:
        self._prompts, self._noise = prompts_of(seed), random.Random(1000 * seed + order)
        self._cores = [SimulatedEngine(CPU, 1) for _ in range(NUM_ENGINES)]
        slots = Workers(FRONTEND, "/nowhere")
        roles = (Role.CORE, Role.EXECUTOR)
        workers = [FRONTEND, *(WorkerId(role, index, 1) for role in roles for index in range(NUM_ENGINES))]
        slots.follow(Topology(1, [ProcessSlot(worker, "", 1, SlotState.READY) for worker in workers]))
        self._now_s = 0.0
        self._ledger = LoadLedger(slots, _config())
        self._selector = EngineSelector(self._ledger, _config(), clock=lambda: self._now_s)
        self._events: list[tuple[float, int, int | None]] = []
        """Time, number, and the engine with a finished step; None: a client sends a request."""
        self._num_events = self._num_sent = 0
        self._live: dict[int, Stream] = {}

    def hit_rate(self) -> float:
        """Run the trace; return its hit rate as a share of the ideal."""
        for _ in range(CLIENTS):
            self._schedule(0.0, None)
        while self._events:
            self._now_s, _, index = heappop(self._events)
            if index is None:
                self._send_next()
            else:
                self._end_step(index)
        ideal = SHAPE.num_groups * (SHAPE.requests_per_group - 1) * SHAPE.prefix
        return sum(core.cached_tokens for core in self._cores) / ideal

    def _schedule(self, at_s: float, index: int | None) -> None:
        self._num_events += 1
        heappush(self._events, (at_s, self._num_events, index))

    def _send_next(self) -> None:
        request_id = self._num_sent
        if request_id == len(self._prompts):
            return
        self._num_sent += 1
        prompt, spec = (
            self._prompts[request_id],
            RequestSpec(SamplingParams(max_tokens=OUTPUT_LEN, seed=0), 0, 0),
        )
        submit = Submit(request_id, TokenPrompt(prompt), spec, int(self._now_s * 1e9), 0)
        stream = self._live[request_id] = Stream(submit, Mailbox(), lambda stream: None)
        self._ledger.open(stream)
        choice = self._selector.choose(stream)
        assert choice is not None
        submit.core, stream.choice = choice.index, choice
        self._ledger.place(stream, choice)
        self._selector.note_sent(stream, choice)
        core = self._cores[choice.index]
        core.admit(request_id, prompt, OUTPUT_LEN, 0, 0, self._now_s)
        if not core.is_busy:
            self._begin_step(choice.index)

    def _begin_step(self, index: int) -> None:
        end_s = self._cores[index].begin_step(self._now_s)
        if end_s is not None:
            self._schedule(self._now_s + (end_s - self._now_s) * self._noise.lognormvariate(0, JITTER), index)

    def _end_step(self, index: int) -> None:
        core = self._cores[index]
        events = core.end_step(self._now_s)
        for request_id, _ in events.first_tokens:
            stream = self._live[request_id]
            stream.started = Started(request_id, SHAPE.prefix + SUFFIX_TOKENS, core.hits_of(request_id), 0, 0)
            self._ledger.start(stream)
            self._selector.note_start(stream, stream.started)
        for request_id in events.ended:
            stream = self._live.pop(request_id)
            stream.num_open = 0
            self._ledger.remove(stream)
            self._ledger.close(stream)
            self._schedule(self._now_s + self._noise.expovariate(1 / PAUSE_S), None)
        self._begin_step(index)


def _config() -> EngineConfig:
    kv = full_layers(1, 1, 1, 2, 16)
    return EngineConfig(
        run_dir="",
        model=ModelConfig(
            path="", tokenizer_path="", served_names=["m"], architecture="", dtype="bfloat16", vocab_size=4096,
            max_model_len=1024, eos_token_ids=[2], kv=kv,
        ),
        cache=CacheConfig(memory_bytes=KV_TOKENS // kv.block_size * kv.bytes_per_block),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048),
        executor=ExecutorConfig(kind="mock"),
        frontend=FrontendConfig(),
        processes=ProcessesConfig(),
    )  # fmt: skip


@contextmanager
def eviction_cost(displaced: float) -> Iterator[None]:
    """Set the cost of an evicted token during the block."""
    before, load_balancer.EVICTION_COST = load_balancer.EVICTION_COST, displaced
    try:
        yield
    finally:
        load_balancer.EVICTION_COST = before


def main() -> None:
    """Simulate, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument(
        "--displaced",
        type=float,
        nargs="+",
        default=[0.0, load_balancer.EVICTION_COST, 1.0, 2.0],
        help="costs of an evicted token",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    arguments = parser.parse_args()
    results = []
    print("| cost of an evicted token | median | minimum | maximum | below 0.90 |\n|---|---|---|---|---|")
    for displaced in arguments.displaced:
        with eviction_cost(displaced):
            runs = [(seed, order) for seed in range(arguments.seeds) for order in range(arguments.orders)]
            rates = [round(Simulation(*each).hit_rate(), 4) for each in runs]
        results.append(Figures(displaced, rates))
        num_low = sum(rate < 0.9 for rate in rates)
        print(
            f"| {displaced:g} | {median(rates):.2f} | {min(rates):.2f} | {max(rates):.2f} | {num_low} of {len(rates)} |",
            flush=True,
        )
    if arguments.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        command = (
            f"python -m bench.routing.simulated_cores --seeds {arguments.seeds} --orders {arguments.orders}"
        )
        report = Report(date, _commit(), machine(), command, results)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
