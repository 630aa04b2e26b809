"""Counters are monotonic for the server's lifetime: over deaths, restarts and scaling of any process."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest

from quintet.deploy.supervisor.process_slots import SlotRecord, SlotTable
from quintet.deploy.supervisor.spawn import ChildProcess
from quintet.frontend.metrics import MetricsPage, collect
from quintet.wire.config import ProcessesConfig
from quintet.wire.ids import Role
from quintet.wire.metrics import Metrics
from quintet.wire.supervision import Heartbeat, MetricsReport

MONOTONIC = ("_total", "_count", "_sum", "_bucket")


class Child:
    """Process that counts, and sends metrics at intervals."""

    pid = 1

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.tokens = self.metrics.counter("generation_tokens", "Tokens.")
        self.wait = self.metrics.histogram("request_queue_time_seconds", "Queue.", (0.1, 1.0))
        self.running = self.metrics.gauge("num_requests_running", "Running.")
        self.cpu_ns = 0

    def work(self, rng: random.Random) -> None:
        self.tokens.inc(rng.randrange(1, 50))
        self.wait.observe(rng.choice([0.05, 0.5, 5.0]))
        self.running.set(rng.randrange(5))
        self.cpu_ns += 10**8


class FakeServer:
    """Slots of a supervisor, and the metrics page."""

    def __init__(self) -> None:
        self.table = SlotTable(Path("/nowhere"), ProcessesConfig(tokenizers=2, detokenizers=2, frontends=2))
        self.reported_tokens: dict[str, float] = defaultdict(float)
        """Tokens that each process has reported."""
        for slot in self.table:
            self.fill(slot)

    def fill(self, slot: SlotRecord) -> None:
        slot.fill(cast(ChildProcess, Child()), 0.0)
        slot.became_ready({}, 0.0)

    def beat(self, slot: SlotRecord) -> None:
        child = cast(Child, slot.process)
        slot.beat(Heartbeat(slot.worker, 0, 0, child.cpu_ns, child.metrics.encoded()), 0.0)
        self.reported_tokens[str(slot.worker)] = child.tokens.value

    def die(self, slot: SlotRecord) -> None:
        slot.vacate("exit status -9")
        slot.epoch += 1
        slot.restarts += 1
        self.fill(slot)

    def retire(self, slot: SlotRecord) -> None:
        slot.is_retiring = True
        slot.vacate("exit status 0")

    def scrape(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        report = MetricsReport(1, self.table.process_metrics(0.0), self.table.past())
        samples = [
            sample for family in MetricsPage(collect(report), "toy").collect() for sample in family.samples
        ]
        shown = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
        assert len(shown) == len(samples), "a series appears twice"
        return shown


def vllm(shown: dict[Any, float], name: str) -> float:
    return shown.get((f"vllm:{name}", frozenset({"model_name": "toy", "engine": "0"}.items())), 0)


@pytest.mark.parametrize("seed", range(5))
def test_counters_are_monotonic_and_keep_reported_values(seed: int) -> None:
    rng, server = random.Random(seed), FakeServer()
    before = server.scrape()
    for _ in range(200):
        slots = [slot for slot in server.table if slot.process is not None]
        slot = rng.choice(slots)
        cast(Any, slot.process).work(rng)
        match rng.randrange(6):
            case 0 | 1 | 2:
                server.beat(slot)
            case 3:
                server.die(slot)
            case 4 if sum(other.role is slot.role for other in slots) > 1:
                server.retire(slot)
            case 5 if slot.role in (Role.TOKENIZER, Role.DETOKENIZER, Role.FRONTEND):
                server.fill(*server.table.allocate(slot.role))
        shown = server.scrape()
        for key, value in before.items():
            if key[0].endswith(MONOTONIC):
                assert shown[key] >= value, key
        before = shown
        assert vllm(shown, "generation_tokens_total") == sum(server.reported_tokens.values())


def test_gauges_of_a_dead_process_are_dropped() -> None:
    server = FakeServer()
    core = next(slot for slot in server.table if slot.role is Role.CORE)
    cast(Any, core.process).work(random.Random(1))
    cast(Any, core.process).running.set(3)
    server.beat(core)
    assert vllm(server.scrape(), "num_requests_running") == 3
    core.vacate("exit status -9")
    shown = server.scrape()
    assert not any("num_requests_running" in name for name, _ in shown)
    assert vllm(shown, "generation_tokens_total") > 0
