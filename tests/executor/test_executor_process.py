"""The executor process: handshake with the core, results, and replacement of the core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.executor.conftest import Drawer, plan_of
from tests.processes.poison import Effect, poison

from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.executor.loop import MAX_FAILURE_CHARS, MAX_FAILURES_ALONE, error_text
from quintet.process.child import CONFIG_FILE, error_file
from quintet.process.runtime import SUPERVISOR
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.wire.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    ModelConfig,
    ProcessesConfig,
    SchedulerConfig,
)
from quintet.wire.errors import EXIT_CONFIG
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import Capacity, StepResult
from quintet.wire.supervision import Heartbeat, ProcessSlot, Ready, SlotState, Stop, Topology

EXECUTOR_ID = WorkerId(Role.EXECUTOR, 0, 3)
DEADLINE_S = 60.0


def config_of(run_dir: Path, **executor: Any) -> EngineConfig:
    kv = full_layers(num_layers=1, num_kv_heads=1, head_dim=8, dtype_bytes=4, block_size=4)
    return EngineConfig(
        run_dir=str(run_dir),
        model=ModelConfig(
            path=str(run_dir / "model"),
            tokenizer_path=str(run_dir),
            served_names=["m"],
            architecture="LlamaForCausalLM",
            dtype="float32",
            vocab_size=100,
            max_model_len=32,
            eos_token_ids=[2],
            kv=kv,
        ),
        cache=CacheConfig(memory_bytes=kv.bytes_per_block * 12 + 1),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        executor=ExecutorConfig(**executor),
        frontend=FrontendConfig(),
        processes=ProcessesConfig(heartbeat_s=0.2),
    )


@dataclass
class SimulatedPeers:
    """The processes that the executor talks to, simulated by the test."""

    run_dir: Path
    bus: Bus
    supervisor: Inbox[Any]
    child: subprocess.Popen[bytes]
    peers: Peers
    arrived: dict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    """Messages by inbox that were received and not yet expected."""

    def core(self, epoch: int) -> Inbox[Any]:
        """Open the core's inbox for this epoch and publish the topology."""
        worker = WorkerId(Role.CORE, 0, epoch)
        inbox: Inbox[Any] = Inbox(self.bus, address_of(self.run_dir, worker), Capacity | StepResult)
        self.peers.send(
            Role.EXECUTOR,
            0,
            Topology(epoch, [ProcessSlot(worker, address_of(self.run_dir, worker), 1, SlotState.READY)]),
        )
        return inbox

    def expect(self, inbox: Inbox[Any], kind: type, accept: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return the next message of a type, dropping others before it; fail at the deadline."""
        arrived = self.arrived[inbox.address]
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            while arrived:
                message = arrived.popleft()
                if isinstance(message, kind) and accept(message):
                    return message
            arrived += inbox.wait(0.5)
        raise AssertionError(f"no {kind.__name__} came")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SimulatedPeers]]:
    """Return a function that starts the executor process."""
    houses: list[SimulatedPeers] = []

    def start(module: str = "quintet.executor.main", **executor: Any) -> SimulatedPeers:
        run_dir = make_run_dir()
        config_of(run_dir, **executor).write(run_dir / CONFIG_FILE)
        bus = Bus(run_dir)
        supervisor: Inbox[Any] = Inbox(bus, address_of(run_dir, SUPERVISOR), Ready | Heartbeat)
        arguments = [
            "--run-dir",
            run_dir,
            "--index",
            "0",
            "--epoch",
            str(EXECUTOR_ID.epoch),
            "--parent",
            str(os.getpid()),
        ]
        child = subprocess.Popen([sys.executable, "-m", module, *map(str, arguments)])
        peers = Peers(bus)
        peers.connect(EXECUTOR_ID, address_of(run_dir, EXECUTOR_ID))
        houses.append(SimulatedPeers(run_dir, bus, supervisor, child, peers))
        return houses[-1]

    yield start
    for simulated in houses:
        simulated.child.kill()
        simulated.child.wait()
        simulated.peers.close()
        simulated.supervisor.close()
        simulated.bus.context.destroy(linger=0)
        for path in simulated.run_dir.iterdir():
            path.unlink()
        simulated.run_dir.rmdir()


def test_capacity_and_results_and_core_replacement(start: Callable[..., SimulatedPeers]) -> None:
    simulated = start(kind="mock")
    ready = simulated.expect(simulated.supervisor, Ready)
    assert ready.facts["blocks"] == "12"

    first = simulated.core(epoch=1)
    capacity = simulated.expect(first, Capacity)
    assert capacity == Capacity(
        EXECUTOR_ID.epoch, num_blocks=12, block_size=4, max_num_seqs=8, max_model_len=32
    )
    plan = plan_of([Drawer(SamplingParams(), seed=5)], [3])
    simulated.peers.send(Role.EXECUTOR, 0, plan)
    result = simulated.expect(first, StepResult)
    assert result.step == plan.step
    first_tokens = result.token_ids
    assert len(first_tokens) == 4
    assert result.compute_ns > 0
    simulated.expect(simulated.supervisor, Heartbeat, lambda beat: beat.progress == 1 and beat.pending == 0)

    second = simulated.core(epoch=2)
    assert simulated.expect(second, Capacity).tables_epoch == 1
    simulated.peers.send(Role.EXECUTOR, 0, plan)  # a plan of the first core, with stale tables
    simulated.peers.send(Role.EXECUTOR, 0, replace(plan, step=2, tables_epoch=1))
    result = simulated.expect(second, StepResult)
    assert result.step == 2
    assert result.token_ids == first_tokens
    first.close()
    second.close()

    simulated.peers.send(Role.EXECUTOR, 0, Stop())
    assert simulated.child.wait(DEADLINE_S) == 0


def test_a_failed_step_resets_the_tables(start: Callable[..., SimulatedPeers]) -> None:
    simulated = start("tests.processes.poison", kind="mock")
    simulated.expect(simulated.supervisor, Ready)
    core = simulated.core(epoch=1)
    assert simulated.expect(core, Capacity).failure == ""
    good = plan_of([Drawer(SamplingParams())], [2])
    bad = plan_of([Drawer(SamplingParams(), prompt=poison(Effect.RAISES)), Drawer(SamplingParams())], [1, 2])
    simulated.peers.send(Role.EXECUTOR, 0, replace(bad, step=1))
    simulated.peers.send(Role.EXECUTOR, 0, replace(good, step=2))
    capacity = simulated.expect(core, Capacity)
    assert (capacity.executor_epoch, capacity.tables_epoch) == (EXECUTOR_ID.epoch, 1)
    assert capacity.failure == "ValueError: poison at work"
    simulated.peers.send(Role.EXECUTOR, 0, replace(good, step=3, tables_epoch=1))
    assert simulated.expect(core, StepResult).step == 3
    simulated.expect(simulated.supervisor, Heartbeat, lambda beat: beat.progress == 1 and beat.pending == 0)
    core.close()


def test_an_invalid_plan_is_reported_as_a_failed_step(start: Callable[..., SimulatedPeers]) -> None:
    """The core then isolates the request; a plan of stale tables is no failure."""
    simulated = start(kind="mock")
    core = simulated.core(epoch=1)
    simulated.expect(core, Capacity)
    drawer = Drawer(SamplingParams())
    good = plan_of([drawer], [2])
    bad = plan_of([Drawer(SamplingParams(), stop_ids=[100])], [2])
    simulated.peers.send(Role.EXECUTOR, 0, replace(good, step=1))
    simulated.peers.send(Role.EXECUTOR, 0, replace(bad, step=7))
    simulated.peers.send(Role.EXECUTOR, 0, replace(bad, step=2, tables_epoch=9))
    simulated.peers.send(Role.EXECUTOR, 0, replace(bad, step=3))
    simulated.peers.send(Role.EXECUTOR, 0, replace(good, step=4))
    received: list[Any] = []
    while not any(isinstance(message, Capacity) for message in received):
        received += core.wait(1.0)
    result, capacity = received
    assert result.step == 1
    assert capacity.tables_epoch == 1 and "invalid lengths or numbers" in capacity.failure
    simulated.peers.send(Role.EXECUTOR, 0, replace(good, step=5, tables_epoch=1))
    assert simulated.expect(core, StepResult).step == 5
    simulated.expect(simulated.supervisor, Heartbeat, lambda beat: beat.progress == 2 and beat.pending == 0)
    core.close()


def test_an_executor_exits_after_repeated_failures(start: Callable[..., SimulatedPeers]) -> None:
    simulated = start("tests.processes.poison", kind="mock")
    simulated.expect(simulated.supervisor, Ready)
    core = simulated.core(epoch=1)
    simulated.expect(core, Capacity)
    bad = plan_of([Drawer(SamplingParams(), prompt=poison(Effect.RAISES_FOR_ALL))], [1])
    good = plan_of([Drawer(SamplingParams())], [2])
    for number in range(MAX_FAILURES_ALONE):
        simulated.peers.send(
            Role.EXECUTOR, 0, replace(good if number else bad, step=number, tables_epoch=number)
        )
        if number + 1 < MAX_FAILURES_ALONE:
            assert simulated.expect(core, Capacity).tables_epoch == number + 1
    assert simulated.child.wait(DEADLINE_S) == 1
    assert "RuntimeError: the device is missing" in error_file(simulated.run_dir, EXECUTOR_ID).read_text()
    core.close()


def test_a_successful_step_resets_the_failure_count(start: Callable[..., SimulatedPeers]) -> None:
    simulated = start("tests.processes.poison", kind="mock")
    simulated.expect(simulated.supervisor, Ready)
    core = simulated.core(epoch=1)
    simulated.expect(core, Capacity)
    bad = plan_of([Drawer(SamplingParams(), prompt=poison(Effect.RAISES))], [1])
    good = plan_of([Drawer(SamplingParams())], [2])
    for number in range(MAX_FAILURES_ALONE + 2):
        simulated.peers.send(Role.EXECUTOR, 0, replace(good, step=number, tables_epoch=number))
        simulated.expect(core, StepResult)
        simulated.peers.send(Role.EXECUTOR, 0, replace(bad, step=number, tables_epoch=number))
        simulated.expect(core, Capacity)
    core.close()


def test_error_text_is_one_line() -> None:
    assert error_text(KeyError("a\n\tb\x07")) == "KeyError: 'a\\n\\tb\\x07'"
    assert error_text(ValueError("a\n\tb\x07c")) == "ValueError: a b?c"
    assert len(error_text(ValueError("x" * 1000))) == MAX_FAILURE_CHARS


def test_a_model_that_cannot_load_ends_startup_with_one_line(start: Callable[..., SimulatedPeers]) -> None:
    simulated = start(kind="torch")
    assert simulated.child.wait(DEADLINE_S) == EXIT_CONFIG
    assert "/model has no weights" in error_file(simulated.run_dir, EXECUTOR_ID).read_text()
