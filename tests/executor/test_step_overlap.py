"""The executor's loop over a device that computes beside it: a worker whose steps end when the test says so."""

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
from tests.executor.test_executor_process import ME, config_of

from quintet.deploy.tools.replay.roles import replay
from quintet.executor import main
from quintet.executor.interface import StepWorker
from quintet.executor.main import Executor
from quintet.process.record import open_recording
from quintet.process.runtime import Process
from quintet.process.sockets import Bus, Inbox, Peers, address_of, make_run_dir
from quintet.process.trace import Span, no_span
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
class Held:
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
    """A worker that hands every step to the test; or, ``at_once``, ends it when it begins."""

    at_once: bool = False
    num_blocks: int = 12
    num_host_blocks: int = 0
    kv_disk: None = None
    kv_peers: None = None
    kv_store: None = None
    swap_bytes_per_s: int = 0
    num_split: int = 0
    experts: None = None
    num_active_slots: int = 0
    work_done: int = 0
    chores: list[str] = field(default_factory=list)
    in_chore: Callable[[], object] = lambda: None
    in_reset: Callable[[], object] = lambda: None
    num_resets: int = 0
    begun: list[Held] = field(default_factory=list)
    refused: dict[int, Exception] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    def waits_for(self, plan: StepPlan) -> bool:
        return False

    @property
    def has_idle_tasks(self) -> bool:
        return bool(self.chores)

    def run_idle_task(self) -> None:
        self.chores.pop()
        self.in_chore()

    def begin(self, plan: StepPlan) -> Held:
        self.num_active_slots += len(plan.new_rows)
        if plan.step in self.refused:
            raise self.refused[plan.step]
        held = Held(plan)
        self.begun.append(held)
        if self.at_once:
            held.end()
        return held

    def reset(self) -> None:
        self.in_reset()
        self.num_resets += 1
        self.num_active_slots = 0

    def is_broken(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)


class House:
    """The executor's loop, turned by the test, and the core that it serves."""

    def __init__(self, config: EngineConfig, worker: StepWorker | None = None) -> None:
        """worker: instead of one whose steps the test ends."""
        self.config = config
        self.is_closed = False
        self.bus = Bus(config.run_dir)
        self.process: Process[StepPlan] = Process(ME, config, StepPlan)
        self.device = Device()
        self.executor = Executor(self.process, self.device if worker is None else worker)
        self.peers = Peers(self.bus)
        self.peers.connect(ME, address_of(config.run_dir, ME))
        self.cores: list[Inbox[Any]] = []
        self.arrived: list[Any] = []
        self.capacity = self.follow_new_core()

    def follow_new_core(self) -> Capacity:
        """Have a new core, the topology say so, and the executor know."""
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
        self.send(msgspec.structs.replace(plan, step=step, tables=tables, sent_ns=time.monotonic_ns()))

    def turn_until_begun(self, num_steps: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len(self.device.begun) < num_steps:
            assert time.monotonic() < deadline, self.device.begun
            self.executor.handle(self.process.receive(0.1))

    def expect(self, kind: Any) -> Any:
        """Turn the loop until the newest core has a message, which must be of this kind."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.arrived:
            assert time.monotonic() < deadline, f"no {kind} came"
            self.executor.handle(self.process.receive(0.01))
            self.arrived += self.cores[-1].wait(0.01)
        message = self.arrived.pop(0)
        assert isinstance(message, kind), message
        return message

    def figure(self, name: str) -> Any:
        snapshot = decode_snapshot(self.process.metrics.encoded())
        return next(series for series in [*snapshot.counters, *snapshot.histograms] if series.name == name)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for held in self.device.begun:
            held.over.set()
        self.executor.close()
        self.process.close()
        self.peers.close()
        for core in self.cores:
            core.close()
        self.bus.context.destroy(linger=0)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    run_dir = make_run_dir()
    config = msgspec.structs.replace(config_of(run_dir, kind="mock"), record=str(tmp_path / "recording"))
    house = House(config)
    yield house
    house.close()
    for path in run_dir.iterdir():
        path.unlink()
    run_dir.rmdir()


def test_a_plan_is_begun_while_the_one_before_it_is_computed(house: House) -> None:
    house.send_plan(1)
    house.send_plan(2, num_rows=2)
    house.turn_until_begun(2)
    first, second = house.device.begun
    assert house.executor.account()[1] == 2
    second.end()
    first.end()
    results = [house.expect(StepResult), house.expect(StepResult)]
    assert [result.step for result in results] == [1, 2], "in the order of the plans"
    assert [len(unpack_i32(result.token_ids)) for result in results] == [1, 2]
    assert [result.num_active_slots for result in results] == [1, 3], "as it was after each plan"
    assert house.executor.account() == (2, 0)


def test_chores_are_done_while_nothing_is_in_flight_and_nobody_waits(house: House) -> None:
    house.device.chores = ["last", "second", "first"]
    while len(house.device.chores) == 3:  # the handshake may still be on its way
        house.executor.run_once()
    assert house.device.chores == ["last", "second"]
    house.send_plan(1)
    while not house.device.begun:  # a chore may come before the plan does
        house.executor.run_once()
    left = len(house.device.chores)
    house.send_plan(2)
    while len(house.device.begun) < 2:
        house.executor.run_once()
    assert len(house.device.chores) == left, "a step was in flight"


def test_a_chore_that_never_ends_is_work_pending_without_progress(house: House) -> None:
    """Ranks do them together: one that has stopped keeps the first waiting there, and heartbeats have to tell."""
    accounts: list[tuple[int, int]] = []
    house.device.in_chore = lambda: accounts.append(house.executor.account())
    house.device.chores = ["second", "first"]
    while house.device.has_idle_tasks:
        house.executor.run_once()
    assert accounts == [(0, 1), (1, 1)]
    assert house.executor.account() == (2, 0)


def test_a_reset_that_never_ends_is_work_pending_without_progress(house: House) -> None:
    """It may wait for other processes as well."""
    accounts: list[tuple[int, int]] = []
    house.device.in_reset = lambda: accounts.append(house.executor.account())
    house.device.refused[1] = ValueError("no such slot")
    house.send_plan(1)
    assert house.expect(Capacity).failure == "ValueError: no such slot"
    assert accounts == [(0, 1)]
    assert house.executor.account() == (0, 0)


def test_a_result_goes_out_while_the_next_step_is_computed(house: House) -> None:
    house.send_plan(1)
    house.send_plan(2)
    house.turn_until_begun(2)
    house.device.begun[0].end()
    assert house.expect(StepResult).step == 1
    house.send_plan(3)
    house.turn_until_begun(3)
    assert house.executor.account() == (1, 2)
    for held in house.device.begun[1:]:
        held.end()
    assert [house.expect(StepResult).step for _ in range(2)] == [2, 3]


def test_the_devices_own_figures_are_the_results(house: House) -> None:
    house.send_plan(1)
    house.turn_until_begun(1)
    held = house.device.begun[0]
    held.device_ms, held.gap_ms = 5.0, 0.25
    held.end()
    result = house.expect(StepResult)
    assert (result.compute_ns, result.wait_ns) == (5_000_000, 250_000)
    gap = house.figure("executor_device_gap_seconds")
    assert (sum(gap.counts), gap.total) == (1, 0.00025)


def test_a_step_that_fails_on_the_device_voids_those_behind_it(house: House) -> None:
    house.send_plan(1)
    house.send_plan(2, num_rows=2)
    house.send_plan(3)
    house.turn_until_begun(3)
    first, second, third = house.device.begun
    first.end()
    third.end()
    second.end(ValueError("late news"))
    assert house.expect(StepResult).step == 1
    capacity = house.expect(Capacity)
    assert (capacity.tables, capacity.failure) == (1, "ValueError: late news")
    assert house.device.num_resets == 1
    assert house.executor.account()[1] == 0
    house.send_plan(4)  # made before the core knew
    house.send_plan(5, tables=1)
    house.turn_until_begun(4)
    assert house.device.begun[3].plan.step == 5
    house.device.begun[3].end()
    assert house.expect(StepResult).step == 5, "nothing of step 3"


def test_a_plan_that_cannot_be_begun_does_not_void_those_before_it(house: House) -> None:
    house.device.refused[2] = ValueError("no such slot")
    house.send_plan(1)
    house.turn_until_begun(1)
    house.send_plan(2)
    threading.Timer(0.05, house.device.begun[0].end).start()  # while the loop waits for it
    assert house.expect(StepResult).step == 1
    assert house.expect(Capacity).failure == "ValueError: no such slot"
    house.send_plan(3, tables=1)
    house.turn_until_begun(2)
    house.device.begun[1].end()
    assert house.expect(StepResult).step == 3


def test_a_result_too_large_to_be_told_is_a_step_that_failed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.device.at_once = True
    house.send_plan(1)
    assert house.expect(StepResult).step == 1
    send = house.process.peers.send

    def refuse(role: Role, index: int, message: msgspec.Struct) -> bool:
        if isinstance(message, StepResult):
            raise FrameTooLarge(900, role, 100)
        return send(role, index, message)

    with monkeypatch.context() as patch:
        patch.setattr(house.process.peers, "send", refuse)
        house.send_plan(2)
        capacity = house.expect(Capacity)
    assert capacity.tables == 1 and capacity.failure.startswith("FrameTooLarge: ")
    house.send_plan(3, tables=1)
    assert house.expect(StepResult).step == 3
    assert house.executor.account()[1] == 0


def test_the_first_failure_is_the_one_that_counts(house: House) -> None:
    house.device.refused[2] = ValueError("because of the first")
    house.send_plan(1)
    house.turn_until_begun(1)
    house.device.begun[0].end(ValueError("the first"))
    house.send_plan(2)
    assert house.expect(Capacity).failure == "ValueError: the first"
    house.send_plan(3, tables=1)
    house.turn_until_begun(2)
    house.device.begun[1].end()
    assert house.expect(StepResult).step == 3
    assert house.executor.account()[1] == 0


def test_a_lost_device_ends_the_loop(house: House) -> None:
    house.send_plan(1, num_rows=2)
    house.turn_until_begun(1)
    house.device.begun[0].end(MemoryError("as a lost device is to this worker"))
    with pytest.raises(MemoryError):
        house.expect(StepResult)


def test_a_new_core_hears_nothing_of_what_was_in_flight(house: House) -> None:
    house.send_plan(1)
    house.send_plan(2)
    house.turn_until_begun(2)
    assert house.follow_new_core().tables == 1
    assert house.executor.account()[1] == 0
    for held in house.device.begun:
        held.end()
    house.send_plan(1, tables=1)
    house.turn_until_begun(3)
    house.device.begun[2].end()
    result = house.expect(StepResult)
    assert (result.step, result.num_active_slots) == (1, 1)


def test_the_first_plan_of_a_new_core_may_be_dropped_whatever_the_last_one_planned(house: House) -> None:
    worker = WorkerId(Role.CORE, 0, 2)
    address = address_of(house.config.run_dir, worker)
    house.cores.append(Inbox(house.bus, address, Capacity | StepResult))
    house.send_plan(7)  # of the first core, and heard of in the turn in which the second is
    house.send(Topology(2, [ProcessSlot(worker, address, 1, SlotState.READY)]))
    run_once: list[Any] = []
    while len(run_once) < 2:
        run_once += house.process.receive(DEADLINE_S)
    house.executor.handle(run_once)
    assert house.expect(Capacity).failure == ""
    house.executor.handle([Dropped("plan", step=1, tables=1)])
    assert "rejected the step's plan" in house.expect(Capacity).failure


def test_a_step_that_never_ends_is_work_pending_without_progress(house: House) -> None:
    house.send_plan(1)
    house.turn_until_begun(1)
    before = house.executor.account()
    house.executor.handle(house.process.receive(0.05))
    assert house.executor.account() == before == (0, 1)
    house.device.work_done += 1
    assert house.executor.account() == (1, 1), "a long step is none: the device's work counts"


def test_a_recording_says_when_steps_ended(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay sends in each turn depends on that, and there the device is never waited for as it was then."""
    house.send_plan(1)
    house.send_plan(2)
    house.turn_until_begun(2)
    house.device.begun[0].end()
    house.expect(StepResult)
    house.send_plan(3)
    house.turn_until_begun(3)
    house.device.begun[1].end(ValueError("late news"))
    house.expect(Capacity)
    house.follow_new_core()
    house.send_plan(1, tables=2)
    house.turn_until_begun(4)
    for held in house.device.begun[2:]:
        held.end()
    house.expect(StepResult)
    house.close()
    assert house.config.record is not None

    class Again(Device):
        def begin(self, plan: StepPlan) -> Held:
            held = super().begin(plan)
            if plan.step == 2:
                held.error = ValueError("late news")
            return held

    def make_worker(config: EngineConfig, span: Span = no_span, followers: None = None) -> Device:
        return Again(at_once=True)

    monkeypatch.setattr(main, "make_worker", make_worker)
    account = replay(open_recording(Path(house.config.record), str(ME)))
    assert account.difference is None
    assert account.num_sent == 5, "two results, and three introductions"
