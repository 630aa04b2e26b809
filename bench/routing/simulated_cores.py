"""The ``shared`` trace of `bench.routing.policies` in virtual time: two real cores, and a frontend's real load balancer.

    python -m bench.routing.simulated_cores [--seeds 10] [--orders 4] [--displaced 0 0.5 1 2] [--save FILE]

Clients are sequential. A step takes the time of a formula, multiplied by random noise, so each replay of a trace has another
order. The memory of both engines together holds little more than all prefixes: a prefix cached by both evicts another one.
``--displaced``: cost of an evicted token (`quintet.frontend.load_balancing.load_balancer.EVICTION_COST`). Prints shares of the
ideal hit rate, in which each prefix is computed once.
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
from bench.routing.policies import CLIENTS, NUM_ENGINES, OUTPUT_LEN, SHAPES, tokens
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
TAIL = 16
"""Tokens of a prompt after its shared prefix."""
KV_TOKENS = int(SHAPE.beginning * SHAPE.num_groups * 0.55) + CLIENTS * 64
"""Of one engine, as in `bench.routing.policies`."""
CPU = Machine(weights_us=1_500, token_us=40, key_us=0.01, pair_us=0.005, kv_tokens=KV_TOKENS)
"""A prompt takes about as long as the embedded model's does in `bench.routing.policies`, some 35 ms."""
JITTER = 0.3
"""Standard deviation of the logarithm of what a step takes beyond that."""
PAUSE_S = 0.0005
"""From an answer's end to its client's next request, on average."""
ME = WorkerId(Role.FRONTEND, 0, 1)


class Figures(msgspec.Struct):
    """One way to count what is displaced."""

    displaced: float
    hit_rates: list[float]
    """Of the ideal, of each trace in each order."""


class Report(msgspec.Struct):
    """The file."""

    date: str
    commit: str
    machine: Host
    command: str
    figures: list[Figures]


def prompts_of(seed: int) -> list[bytes]:
    """Return those of the trace, in its order."""
    rng = random.Random(seed)
    beginnings = [tokens(rng, SHAPE.beginning) for _ in range(SHAPE.num_groups)]
    prompts = [[*each, *tokens(rng, TAIL)] for each in beginnings for _ in range(SHAPE.requests_per_group)]
    rng.shuffle(prompts)
    return [pack_i32(prompt) for prompt in prompts]


class Play:
    """One trace, in one order."""

    def __init__(self, seed: int, order: int) -> None:
        self._prompts, self._noise = prompts_of(seed), random.Random(1000 * seed + order)
        self._cores = [SimulatedEngine(CPU, 1) for _ in range(NUM_ENGINES)]
        slots = Workers(ME, "/nowhere")
        roles = (Role.CORE, Role.EXECUTOR)
        workers = [ME, *(WorkerId(role, index, 1) for role in roles for index in range(NUM_ENGINES))]
        slots.follow(Topology(1, [ProcessSlot(worker, "", 1, SlotState.READY) for worker in workers]))
        self._now_s = 0.0
        self._ledger = LoadLedger(slots, _config())
        self._selector = EngineSelector(self._ledger, _config(), clock=lambda: self._now_s)
        self._events: list[tuple[float, int, int | None]] = []
        """Time, number, and the engine with a finished step; None: a client sends a request."""
        self._num_events = self._num_asked = 0
        self._live: dict[int, Stream] = {}

    def hit_rate(self) -> float:
        """Play it."""
        for _ in range(CLIENTS):
            self._at(0.0, None)
        while self._events:
            self._now_s, _, index = heappop(self._events)
            if index is None:
                self._ask()
            else:
                self._end_step(index)
        ideal = SHAPE.num_groups * (SHAPE.requests_per_group - 1) * SHAPE.beginning
        return sum(core.cached_tokens for core in self._cores) / ideal

    def _at(self, when_s: float, index: int | None) -> None:
        self._num_events += 1
        heappush(self._events, (when_s, self._num_events, index))

    def _ask(self) -> None:
        at = self._num_asked
        if at == len(self._prompts):
            return
        self._num_asked += 1
        prompt, spec = self._prompts[at], RequestSpec(SamplingParams(max_tokens=OUTPUT_LEN, seed=0), 0, 0)
        submit = Submit(at, TokenPrompt(prompt), spec, int(self._now_s * 1e9), 0)
        stream = self._live[at] = Stream(submit, Mailbox(), lambda stream: None)
        self._ledger.open(stream)
        choice = self._selector.choose(stream)
        assert choice is not None
        submit.core, stream.choice = choice.index, choice
        self._ledger.place(stream, choice)
        self._selector.note_sent(stream, choice)
        core = self._cores[choice.index]
        core.admit(at, prompt, OUTPUT_LEN, 0, 0, self._now_s)
        if not core.is_busy:
            self._begin_step(choice.index)

    def _begin_step(self, index: int) -> None:
        end_s = self._cores[index].begin(self._now_s)
        if end_s is not None:
            self._at(self._now_s + (end_s - self._now_s) * self._noise.lognormvariate(0, JITTER), index)

    def _end_step(self, index: int) -> None:
        core = self._cores[index]
        done = core.end(self._now_s)
        for at, _ in done.firsts:
            stream = self._live[at]
            stream.started = Started(at, SHAPE.beginning + TAIL, core.found_of(at), 0, 0)
            self._ledger.start(stream)
            self._selector.note_start(stream, stream.started)
        for at in done.ended:
            stream = self._live.pop(at)
            stream.num_open = 0
            self._ledger.remove(stream)
            self._ledger.close(stream)
            self._at(self._now_s + self._noise.expovariate(1 / PAUSE_S), None)
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
def counting(displaced: float) -> Iterator[None]:
    """Have what is displaced count so much."""
    before, load_balancer.EVICTION_COST = load_balancer.EVICTION_COST, displaced
    try:
        yield
    finally:
        load_balancer.EVICTION_COST = before


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument(
        "--displaced", type=float, nargs="+", default=[0.0, load_balancer.EVICTION_COST, 1.0, 2.0]
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    arguments = parser.parse_args()
    found = []
    print("| displaced counts | median | least | most | below 0.90 |\n|---|---|---|---|---|")
    for displaced in arguments.displaced:
        with counting(displaced):
            plays = [(seed, order) for seed in range(arguments.seeds) for order in range(arguments.orders)]
            rates = [round(Play(*each).hit_rate(), 4) for each in plays]
        found.append(Figures(displaced, rates))
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
        report = Report(date, _commit(), machine(), command, found)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
