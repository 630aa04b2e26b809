"""Counters never go back while the server lives: over deaths, restarts and scaling of any process, whoever is asked."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest

from quintet.deploy.supervisor.process_slots import SlotRecord, SlotTable
from quintet.deploy.supervisor.spawn import ChildProcess
from quintet.frontend.metrics import Page, collect
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
    """The seats of a supervisor, and what whoever asks is shown."""

    def __init__(self) -> None:
        self.table = SlotTable(Path("/nowhere"), ProcessesConfig(tokenizers=2, detokenizers=2, frontends=2))
        self.told_tokens: dict[str, float] = defaultdict(float)
        """Tokens that each process has told of."""
        for seat in self.table:
            self.fill(seat)

    def fill(self, seat: SlotRecord) -> None:
        seat.fill(cast(ChildProcess, Child()), 0.0)
        seat.became_ready({}, 0.0)

    def beat(self, seat: SlotRecord) -> None:
        child = cast(Child, seat.process)
        seat.beat(Heartbeat(seat.worker, 0, 0, child.cpu_ns, child.metrics.encoded()), 0.0)
        self.told_tokens[str(seat.worker)] = child.tokens.value

    def die(self, seat: SlotRecord) -> None:
        seat.vacate("exit status -9")
        seat.epoch += 1
        seat.restarts += 1
        self.fill(seat)

    def retire(self, seat: SlotRecord) -> None:
        seat.is_retiring = True
        seat.vacate("exit status 0")

    def scrape(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        report = MetricsReport(1, self.table.figures(0.0), self.table.past())
        samples = [sample for family in Page(collect(report), "toy").collect() for sample in family.samples]
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
        seats = [seat for seat in server.table if seat.process is not None]
        seat = draw.choice(seats)
        cast(Any, seat.process).work(draw)
        match draw.randrange(6):
            case 0 | 1 | 2:
                server.beat(seat)
            case 3:
                server.die(seat)
            case 4 if sum(other.role is seat.role for other in seats) > 1:
                server.retire(seat)
            case 5 if seat.role in (Role.TOKENIZER, Role.DETOKENIZER, Role.FRONTEND):
                server.fill(*server.table.vacancy(seat.role))
        shown = server.scrape()
        for key, value in before.items():
            if key[0].endswith(NEVER_BACK):
                assert shown[key] >= value, key
        before = shown
        assert vllm(shown, "generation_tokens_total") == sum(server.told_tokens.values())


def test_what_a_dead_process_held_is_not_shown_as_if_it_lived() -> None:
    server = Server()
    core = next(seat for seat in server.table if seat.role is Role.CORE)
    cast(Any, core.process).work(random.Random(1))
    cast(Any, core.process).running.set(3)
    server.beat(core)
    assert vllm(server.scrape(), "num_requests_running") == 3
    core.vacate("exit status -9")
    shown = server.scrape()
    assert not any("num_requests_running" in name for name, _ in shown)
    assert vllm(shown, "generation_tokens_total") > 0
