"""The executor loop over an asynchronous device: the test ends the worker's steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.executor.conftest import Drawer, plan_of
from tests.executor.test_executor_process import EXECUTOR_ID, config_of

from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.deploy.tools.replay.roles import replay
from quintet.executor import main
from quintet.executor.interface import StepWorker
from quintet.executor.loop import Executor
from quintet.process.record import open_recording
from quintet.process.runtime import Process
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.dropped import Dropped
from quintet.wire.ids import Role, WorkerId
from quintet.wire.limits import FrameTooLarge
from quintet.wire.metrics import decode_snapshot
from quintet.wire.params import SamplingParams
from quintet.wire.step import Capacity, StepPlan, StepResult
from quintet.wire.supervision import ProcessSlot, SlotState, Topology

DEADLINE_S = 60.0


@dataclass
class HeldStep:
    """A step on the device. It draws its own number for every row."""

    plan: StepPlan
    device_ms: float | None = None
    gap_ms: float | None = None
    error: Exception | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.over.set()

    def wait(self) -> None:
        assert self.over.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def result(self) -> StepResult:
        self.wait()
        return StepResult(self.plan.step, 0, pack_i32([self.plan.step % 100] * len(self.plan.samples)))


@dataclass
class Device:
    """A worker that passes every step to the test, or ends it immediately with ``at_once``."""

    at_once: bool = False
    num_blocks: int = 12
    num_host_blocks: int = 0
    kv: None = None
    swap_bytes_per_s: int = 0
    num_split: int = 0
    output_cache: None = None
    experts: None = None
    num_active_slots: int = 0
    work_done: int = 0
    idle_tasks: list[str] = field(default_factory=list)
    in_idle_task: Callable[[], object] = lambda: None
    in_reset: Callable[[], object] = lambda: None
    num_resets: int = 0
    started: list[HeldStep] = field(default_factory=list)
    refused: dict[int, Exception] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    def waits_for(self, plan: StepPlan) -> bool:
        return False

    @property
    def has_idle_tasks(self) -> bool:
        return bool(self.idle_tasks)

    def run_idle_task(self) -> None:
        self.idle_tasks.pop()
        self.in_idle_task()

    def begin(self, plan: StepPlan) -> HeldStep:
        self.num_active_slots += len(plan.new_rows)
        if plan.step in self.refused:
            raise self.refused[plan.step]
        held = HeldStep(plan)
        self.started.append(held)
        if self.at_once:
            held.end()
        return held

    def reset(self) -> None:
        self.in_reset()
        self.num_resets += 1
        self.num_active_slots = 0

    def is_broken(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)


class LoopBench:
    """The executor loop, driven by the test, and its core."""

    def __init__(self, config: EngineConfig, worker: StepWorker | None = None) -> None:
        """worker: replaces the default, which waits for the test to end its steps."""
        self.config = config
        self.is_closed = False
        self.bus = Bus(config.run_dir)
        self.process: Process[StepPlan] = Process(EXECUTOR_ID, config, StepPlan)
        self.device = Device()
        self.executor = Executor(self.process, self.device if worker is None else worker)
        self.peers = Peers(self.bus)
        self.peers.connect(EXECUTOR_ID, address_of(config.run_dir, EXECUTOR_ID))
        self.cores: list[Inbox[Any]] = []
        self.arrived: list[Any] = []
        self.capacity = self.follow_new_core()

    def follow_new_core(self) -> Capacity:
        """Replace the core and publish the topology until the executor knows."""
        epoch = len(self.cores) + 1
        worker = WorkerId(Role.CORE, 0, epoch)
        address = address_of(self.config.run_dir, worker)
        self.cores.append(Inbox(self.bus, address, Capacity | StepResult))
        self.send(Topology(epoch, [ProcessSlot(worker, address, 1, SlotState.READY)]))
        return self.expect(Capacity)

    def send(self, message: msgspec.Struct) -> None:
        self.peers.send(Role.EXECUTOR, 0, message)

    def send_plan(self, step: int, tables: int = 0, num_rows: int = 1) -> None:
        plan = plan_of([Drawer(SamplingParams())] * num_rows, list(range(num_rows)))
        self.send(msgspec.structs.replace(plan, step=step, tables_epoch=tables, sent_ns=time.monotonic_ns()))

    def run_until_started(self, num_steps: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len(self.device.started) < num_steps:
            assert time.monotonic() < deadline, self.device.started
            self.executor.handle(self.process.receive(0.1))

    def expect(self, kind: Any) -> Any:
        """Run the loop until the newest core has a message; it must be of this type."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.arrived:
            assert time.monotonic() < deadline, f"no {kind} came"
            self.executor.handle(self.process.receive(0.01))
            self.arrived += self.cores[-1].wait(0.01)
        message = self.arrived.pop(0)
        assert isinstance(message, kind), message
        return message

    def metric(self, name: str) -> Any:
        snapshot = decode_snapshot(self.process.metrics.encoded())
        return next(series for series in [*snapshot.counters, *snapshot.histograms] if series.name == name)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for held in self.device.started:
            held.over.set()
        self.executor.close()
        self.process.close()
        self.peers.close()
        for core in self.cores:
            core.close()
        self.bus.context.destroy(linger=0)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[LoopBench]:
    run_dir = make_run_dir()
    config = msgspec.structs.replace(config_of(run_dir, kind="mock"), record=str(tmp_path / "recording"))
    loop = LoopBench(config)
    yield loop
    loop.close()
    for path in run_dir.iterdir():
        path.unlink()
    run_dir.rmdir()


def test_a_plan_starts_while_the_previous_one_is_computed(loop: LoopBench) -> None:
    loop.send_plan(1)
    loop.send_plan(2, num_rows=2)
    loop.run_until_started(2)
    first, second = loop.device.started
    assert loop.executor.account()[1] == 2
    second.end()
    first.end()
    results = [loop.expect(StepResult), loop.expect(StepResult)]
    assert [result.step for result in results] == [1, 2], "results must follow the order of plans"
    assert [len(unpack_i32(result.token_ids)) for result in results] == [1, 2]
    assert [result.num_active_slots for result in results] == [1, 3], "expected the number after each plan"
    assert loop.executor.account() == (2, 0)


def test_idle_tasks_run_only_without_steps_in_flight(loop: LoopBench) -> None:
    loop.device.idle_tasks = ["last", "second", "first"]
    while len(loop.device.idle_tasks) == 3:  # the handshake may still be in progress
        loop.executor.run_once()
    assert loop.device.idle_tasks == ["last", "second"]
    loop.send_plan(1)
    while not loop.device.started:  # an idle task may run before the plan arrives
        loop.executor.run_once()
    left = len(loop.device.idle_tasks)
    loop.send_plan(2)
    while len(loop.device.started) < 2:
        loop.executor.run_once()
    assert len(loop.device.idle_tasks) == left, "no idle task may run during a step"


def test_an_endless_idle_task_is_pending_work_without_progress(loop: LoopBench) -> None:
    """Ranks run them together: a stopped rank blocks the first one, and heartbeats must show it."""
    accounts: list[tuple[int, int]] = []
    loop.device.in_idle_task = lambda: accounts.append(loop.executor.account())
    loop.device.idle_tasks = ["second", "first"]
    while loop.device.has_idle_tasks:
        loop.executor.run_once()
    assert accounts == [(0, 1), (1, 1)]
    assert loop.executor.account() == (2, 0)


def test_an_endless_reset_is_pending_work_without_progress(loop: LoopBench) -> None:
    """A reset may wait for other processes."""
    accounts: list[tuple[int, int]] = []
    loop.device.in_reset = lambda: accounts.append(loop.executor.account())
    loop.device.refused[1] = ValueError("no such slot")
    loop.send_plan(1)
    assert loop.expect(Capacity).failure == "ValueError: no such slot"
    assert accounts == [(0, 1)]
    assert loop.executor.account() == (0, 0)


def test_a_result_is_sent_while_the_next_step_is_computed(loop: LoopBench) -> None:
    loop.send_plan(1)
    loop.send_plan(2)
    loop.run_until_started(2)
    loop.device.started[0].end()
    assert loop.expect(StepResult).step == 1
    loop.send_plan(3)
    loop.run_until_started(3)
    assert loop.executor.account() == (1, 2)
    for held in loop.device.started[1:]:
        held.end()
    assert [loop.expect(StepResult).step for _ in range(2)] == [2, 3]


def test_device_metrics_are_in_the_result(loop: LoopBench) -> None:
    loop.send_plan(1)
    loop.run_until_started(1)
    held = loop.device.started[0]
    held.device_ms, held.gap_ms = 5.0, 0.25
    held.end()
    result = loop.expect(StepResult)
    assert (result.compute_ns, result.wait_ns) == (5_000_000, 250_000)
    gap = loop.metric("executor_device_gap_seconds")
    assert (sum(gap.counts), gap.total) == (1, 0.00025)


def test_a_failed_step_cancels_later_steps(loop: LoopBench) -> None:
    loop.send_plan(1)
    loop.send_plan(2, num_rows=2)
    loop.send_plan(3)
    loop.run_until_started(3)
    first, second, third = loop.device.started
    first.end()
    third.end()
    second.end(ValueError("late news"))
    assert loop.expect(StepResult).step == 1
    capacity = loop.expect(Capacity)
    assert (capacity.tables_epoch, capacity.failure) == (1, "ValueError: late news")
    assert loop.device.num_resets == 1
    assert loop.executor.account()[1] == 0
    loop.send_plan(4)  # made before the core received the failure
    loop.send_plan(5, tables=1)
    loop.run_until_started(4)
    assert loop.device.started[3].plan.step == 5
    loop.device.started[3].end()
    assert loop.expect(StepResult).step == 5, "step 3 must have no result"


def test_a_rejected_plan_does_not_cancel_earlier_steps(loop: LoopBench) -> None:
    loop.device.refused[2] = ValueError("no such slot")
    loop.send_plan(1)
    loop.run_until_started(1)
    loop.send_plan(2)
    threading.Timer(0.05, loop.device.started[0].end).start()  # while the loop waits for it
    assert loop.expect(StepResult).step == 1
    assert loop.expect(Capacity).failure == "ValueError: no such slot"
    loop.send_plan(3, tables=1)
    loop.run_until_started(2)
    loop.device.started[1].end()
    assert loop.expect(StepResult).step == 3


def test_a_result_too_large_to_send_is_a_failed_step(
    loop: LoopBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.device.at_once = True
    loop.send_plan(1)
    assert loop.expect(StepResult).step == 1
    send = loop.process.peers.send

    def refuse(role: Role, index: int, message: msgspec.Struct) -> bool:
        if isinstance(message, StepResult):
            raise FrameTooLarge(900, role, 100)
        return send(role, index, message)

    with monkeypatch.context() as patch:
        patch.setattr(loop.process.peers, "send", refuse)
        loop.send_plan(2)
        capacity = loop.expect(Capacity)
    assert capacity.tables_epoch == 1 and capacity.failure.startswith("FrameTooLarge: ")
    loop.send_plan(3, tables=1)
    assert loop.expect(StepResult).step == 3
    assert loop.executor.account()[1] == 0


def test_the_first_failure_is_reported(loop: LoopBench) -> None:
    loop.device.refused[2] = ValueError("because of the first")
    loop.send_plan(1)
    loop.run_until_started(1)
    loop.device.started[0].end(ValueError("the first"))
    loop.send_plan(2)
    assert loop.expect(Capacity).failure == "ValueError: the first"
    loop.send_plan(3, tables=1)
    loop.run_until_started(2)
    loop.device.started[1].end()
    assert loop.expect(StepResult).step == 3
    assert loop.executor.account()[1] == 0


def test_a_lost_device_ends_the_loop(loop: LoopBench) -> None:
    loop.send_plan(1, num_rows=2)
    loop.run_until_started(1)
    loop.device.started[0].end(MemoryError("device lost"))
    with pytest.raises(MemoryError):
        loop.expect(StepResult)


def test_a_new_core_receives_no_results_of_earlier_plans(loop: LoopBench) -> None:
    loop.send_plan(1)
    loop.send_plan(2)
    loop.run_until_started(2)
    assert loop.follow_new_core().tables_epoch == 1
    assert loop.executor.account()[1] == 0
    for held in loop.device.started:
        held.end()
    loop.send_plan(1, tables=1)
    loop.run_until_started(3)
    loop.device.started[2].end()
    result = loop.expect(StepResult)
    assert (result.step, result.num_active_slots) == (1, 1)


def test_the_first_plan_of_a_new_core_may_be_dropped(loop: LoopBench) -> None:
    worker = WorkerId(Role.CORE, 0, 2)
    address = address_of(loop.config.run_dir, worker)
    loop.cores.append(Inbox(loop.bus, address, Capacity | StepResult))
    loop.send_plan(7)  # from the first core, received in the same turn as the second
    loop.send(Topology(2, [ProcessSlot(worker, address, 1, SlotState.READY)]))
    run_once: list[Any] = []
    while len(run_once) < 2:
        run_once += loop.process.receive(DEADLINE_S)
    loop.executor.handle(run_once)
    assert loop.expect(Capacity).failure == ""
    loop.executor.handle([Dropped("plan", step=1, tables_epoch=1)])
    assert "rejected the step's plan" in loop.expect(Capacity).failure


def test_an_endless_step_is_pending_work_without_progress(loop: LoopBench) -> None:
    loop.send_plan(1)
    loop.run_until_started(1)
    before = loop.executor.account()
    loop.executor.handle(loop.process.receive(0.05))
    assert loop.executor.account() == before == (0, 1)
    loop.device.work_done += 1
    assert loop.executor.account() == (1, 1), "a long step makes progress: the device's work counts"


def test_a_recording_has_the_end_times_of_steps(loop: LoopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay sends messages by these times; its device is never waited for."""
    loop.send_plan(1)
    loop.send_plan(2)
    loop.run_until_started(2)
    loop.device.started[0].end()
    loop.expect(StepResult)
    loop.send_plan(3)
    loop.run_until_started(3)
    loop.device.started[1].end(ValueError("late news"))
    loop.expect(Capacity)
    loop.follow_new_core()
    loop.send_plan(1, tables=2)
    loop.run_until_started(4)
    for held in loop.device.started[2:]:
        held.end()
    loop.expect(StepResult)
    loop.close()
    assert loop.config.record is not None

    class InstantDevice(Device):
        def begin(self, plan: StepPlan) -> HeldStep:
            held = super().begin(plan)
            if plan.step == 2:
                held.error = ValueError("late news")
            return held

    def make_worker(config: EngineConfig, span: TraceSpan = no_span, followers: None = None) -> Device:
        return InstantDevice(at_once=True)

    monkeypatch.setattr(main, "make_worker", make_worker)
    account = replay(open_recording(Path(loop.config.record), str(EXECUTOR_ID)))
    assert account.difference is None
    assert account.num_sent == 5, "expected two results and three handshake messages"
