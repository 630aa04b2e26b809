"""Counters never go back while the server lives: over deaths, restarts and scaling of any process, whoever is asked."""

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

NEVER_BACK = ("_total", "_count", "_sum", "_bucket")


class Child:
    """A process that counts, and tells the supervisor now and then."""

    pid = 1

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.tokens = self.metrics.counter("generation_tokens", "Tokens.")
        self.wait = self.metrics.histogram("request_queue_time_seconds", "Queue.", (0.1, 1.0))
        self.running = self.metrics.gauge("num_requests_running", "Running.")
        self.cpu_ns = 0

    def work(self, draw: random.Random) -> None:
        self.tokens.inc(draw.randrange(1, 50))
        self.wait.observe(draw.choice([0.05, 0.5, 5.0]))
        self.running.set(draw.randrange(5))
        self.cpu_ns += 10**8


class Server:
    """The slots of a supervisor, and what whoever asks is shown."""

    def __init__(self) -> None:
        self.table = SlotTable(Path("/nowhere"), ProcessesConfig(tokenizers=2, detokenizers=2, frontends=2))
        self.told_tokens: dict[str, float] = defaultdict(float)
        """Tokens that each process has told of."""
        for slot in self.table:
            self.fill(slot)

    def fill(self, slot: SlotRecord) -> None:
        slot.fill(cast(ChildProcess, Child()), 0.0)
        slot.became_ready({}, 0.0)

    def beat(self, slot: SlotRecord) -> None:
        child = cast(Child, slot.process)
        slot.beat(Heartbeat(slot.worker, 0, 0, child.cpu_ns, child.metrics.encoded()), 0.0)
        self.told_tokens[str(slot.worker)] = child.tokens.value

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
        assert len(shown) == len(samples), "a series is shown twice"
        return shown


def vllm(shown: dict[Any, float], name: str) -> float:
    return shown.get((f"vllm:{name}", frozenset({"model_name": "toy", "engine": "0"}.items())), 0)


@pytest.mark.parametrize("seed", range(5))
def test_no_count_goes_back_and_none_is_lost_that_was_told(seed: int) -> None:
    draw, server = random.Random(seed), Server()
    before = server.scrape()
    for _ in range(200):
        slots = [slot for slot in server.table if slot.process is not None]
        slot = draw.choice(slots)
        cast(Any, slot.process).work(draw)
        match draw.randrange(6):
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
            if key[0].endswith(NEVER_BACK):
                assert shown[key] >= value, key
        before = shown
        assert vllm(shown, "generation_tokens_total") == sum(server.told_tokens.values())


def test_what_a_dead_process_held_is_not_shown_as_if_it_lived() -> None:
    server = Server()
    core = next(slot for slot in server.table if slot.role is Role.CORE)
    cast(Any, core.process).work(random.Random(1))
    cast(Any, core.process).running.set(3)
    server.beat(core)
    assert vllm(server.scrape(), "num_requests_running") == 3
    core.vacate("exit status -9")
    shown = server.scrape()
    assert not any("num_requests_running" in name for name, _ in shown)
    assert vllm(shown, "generation_tokens_total") > 0
