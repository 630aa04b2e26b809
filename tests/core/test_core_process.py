"""Core process: sockets, replaced peers, dropped messages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quintet.core import main
from quintet.core.main import Core, Message
from quintet.process.runtime import SUPERVISOR, Process, Stopping
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.wire import codec
from quintet.wire.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    KvPeersConfig,
    ProcessesConfig,
    SchedulerConfig,
)
from quintet.wire.errors import ErrorCode
from quintet.wire.ids import RequestIds, Role, WorkerId
from quintet.wire.kv_spec import full_layers
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, TierCapacity
from quintet.wire.messages import (
    Admit,
    Cancel,
    Failed,
    InFlightReport,
    Live,
    Resume,
    Resumed,
    Tokens,
    Unknown,
)
from quintet.wire.metrics import decode_snapshot
from quintet.wire.params import SamplingParams
from quintet.wire.request import KvTransfer, RequestSpec, ResumeToken
from quintet.wire.step import Capacity, StepPlan
from quintet.wire.supervision import Heartbeat, ProcessSlot, Ready, SlotState, Stop, Topology
from tests.wire.respec import changed

from ..small_frames import limit_frames
from .fake import FakeExecutor
from .fake_model import VOCAB, expected, make_model

KV = full_layers(1, 1, 2, 4, 4)

ME = WorkerId(Role.CORE, 0, 1)
PROMPT = list(range(20, 30))


class PeerProcesses:
    """Every peer process of the core, in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.bus = Bus(config.run_dir)
        self.inboxes: dict[WorkerId, Inbox[msgspec.Struct]] = {}
        self.peers = Peers(self.bus)
        self.peers.connect(ME, address_of(config.run_dir, ME))
        self.version = 0
        self.bind(SUPERVISOR, Ready | Heartbeat)

    def bind(self, worker: WorkerId, accepts: object) -> None:
        self.inboxes[worker] = Inbox(self.bus, address_of(self.config.run_dir, worker), accepts)  # type: ignore[arg-type]

    def send(self, message: msgspec.Struct) -> None:
        self.peers.send(Role.CORE, 0, message)

    def publish(self, *workers: WorkerId) -> None:
        self.version += 1
        slots = [
            ProcessSlot(worker, address_of(self.config.run_dir, worker), 1, SlotState.READY)
            for worker in workers
        ]
        self.send(Topology(self.version, slots))

    def receive(self, worker: WorkerId) -> msgspec.Struct:
        messages = self.receive_all(worker)
        assert len(messages) == 1, messages
        return messages[0]

    def receive_all(self, worker: WorkerId) -> list[msgspec.Struct]:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            messages = self.inboxes[worker].wait(1.0)
            if messages:
                return messages
        raise AssertionError(f"nothing came to {worker}")

    def close(self) -> None:
        for inbox in self.inboxes.values():
            inbox.close()
        self.peers.close()
        self.bus.close()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        run_dir=str(tmp_path),
        model=make_model(128, KV),
        cache=CacheConfig(memory_bytes=0),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, audit=True),
        executor=ExecutorConfig(),
        frontend=FrontendConfig(),
        processes=ProcessesConfig(heartbeat_s=0.05),
    )


@pytest.fixture
def peer_processes(config: EngineConfig) -> Iterator[PeerProcesses]:
    world = PeerProcesses(config)

    def run() -> None:
        with contextlib.suppress(Stopping):
            Core(Process(ME, config, Message)).run()

    thread = threading.Thread(target=run)
    thread.start()
    yield world
    world.send(Stop())
    thread.join(10)
    assert not thread.is_alive()
    world.close()


EXECUTOR, DETOKENIZER, FRONTEND = (
    WorkerId(Role.EXECUTOR, 0, 1),
    WorkerId(Role.DETOKENIZER, 0, 1),
    WorkerId(Role.FRONTEND, 0, 1),
)


def serve(
    peer_processes: PeerProcesses, executor: WorkerId, device: FakeExecutor, detokenizer: WorkerId
) -> list[Tokens]:
    """Execute plans until some request has ended; return the detokenizer's messages."""
    received: list[Tokens] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for plan in peer_processes.inboxes[executor].wait(0.01):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
            peer_processes.send(device.results.popleft())
        for message in peer_processes.inboxes[detokenizer].wait(0.01):
            assert isinstance(message, Tokens)
            received.append(message)
            if any(message.finishes):
                return received
    raise AssertionError(received)


def admit(request_id: int, prompt: list[int], max_tokens: int, stops: tuple[int, ...] = ()) -> Admit:
    params = SamplingParams(seed=3, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=list(stops))
    now = time.monotonic_ns()
    return Admit(request_id, codec.pack_i32(prompt), RequestSpec(params, now, 0), now)


def outputs(received: list[Tokens]) -> list[int]:
    return [token for message in received for token in codec.unpack_i32(message.token_ids)]


def test_serves_a_request_over_sockets(peer_processes: PeerProcesses) -> None:
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (FRONTEND, Failed)):
        peer_processes.bind(worker, accepts)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    ids = RequestIds(0, 1)
    peer_processes.send(admit(ids.take(), PROMPT, 6))  # before the capacity is known
    peer_processes.send(admit(ids.take(), [], 6))
    capacity = Capacity(1, 32, 4, 8, 128)
    peer_processes.send(capacity)
    received = serve(peer_processes, EXECUTOR, FakeExecutor(capacity, KV), DETOKENIZER)
    assert outputs(received) == expected(PROMPT, 3, 6, stops=())
    failed = peer_processes.receive(FRONTEND)
    assert isinstance(failed, Failed) and "0 tokens" in failed.message


def test_replaced_executor_and_detokenizer_lose_nothing(peer_processes: PeerProcesses) -> None:
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens)):
        peer_processes.bind(worker, accepts)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    capacity = Capacity(1, 32, 4, 8, 128)
    peer_processes.send(capacity)
    request = admit(RequestIds(0, 1).take(), PROMPT, 6)
    peer_processes.send(request)
    device = FakeExecutor(capacity, KV)
    plan = peer_processes.receive_all(EXECUTOR)[0]
    assert isinstance(plan, StepPlan)
    device.execute(plan)
    peer_processes.send(device.results.popleft())
    peer_processes.receive(DETOKENIZER)  # one token, then executor and detokenizer are replaced
    new_executor, new_detokenizer = WorkerId(Role.EXECUTOR, 0, 2), WorkerId(Role.DETOKENIZER, 0, 2)
    peer_processes.bind(new_executor, StepPlan)
    peer_processes.bind(new_detokenizer, Tokens)
    peer_processes.publish(new_executor, new_detokenizer, FRONTEND)
    capacity = Capacity(2, 32, 4, 8, 128)
    peer_processes.send(capacity)
    peer_processes.send(changed(request, attempt=1, topology=2))  # the frontend has seen no token
    received = serve(peer_processes, new_executor, FakeExecutor(capacity, KV), new_detokenizer)
    wanted = expected(PROMPT, 3, 6, stops=())
    assert list(codec.unpack_i32(received[0].opens[0].output_ids)) == wanted[:1]
    assert outputs(received) == wanted[1:]


def test_requests_of_a_replaced_frontend_end(peer_processes: PeerProcesses) -> None:
    peer_processes.bind(EXECUTOR, StepPlan)
    peer_processes.bind(DETOKENIZER, Tokens)
    other = WorkerId(Role.FRONTEND, 1, 1)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND, other)
    peer_processes.send(Capacity(1, 32, 4, 8, 128))
    peer_processes.send(admit(RequestIds(0, 1).take(), PROMPT, 6))
    peer_processes.send(admit(RequestIds(1, 1).take(), PROMPT, 6))
    deadline = time.monotonic() + 10
    peer_processes.publish(EXECUTOR, DETOKENIZER, WorkerId(Role.FRONTEND, 0, 2), other)
    while time.monotonic() < deadline:
        for message in peer_processes.receive_all(SUPERVISOR):
            if isinstance(message, Heartbeat) and message.pending == 1:
                return
    raise AssertionError("the request of the dead frontend is still alive")


class SteppedCore:
    """Core without its own thread: the test delivers messages."""

    def __init__(self, config: EngineConfig) -> None:
        self.peer_processes = PeerProcesses(config)
        self.core = Core(Process(ME, config, Message))

    def deliver(self, count: int) -> None:
        """Deliver exactly the next ``count`` messages to the core, in one batch."""
        batch: list[object] = []
        while len(batch) < count:
            batch += self.core.process.receive()
        assert len(batch) == count
        self.core.apply(batch)  # type: ignore[arg-type]

    def close(self) -> None:
        self.core.process.close()
        self.peer_processes.close()


@pytest.fixture
def stepped_core(config: EngineConfig) -> Iterator[SteppedCore]:
    with contextlib.closing(SteppedCore(config)) as stepped_core:
        yield stepped_core


NEW_EXECUTOR, NEW_DETOKENIZER = WorkerId(Role.EXECUTOR, 0, 2), WorkerId(Role.DETOKENIZER, 0, 2)


def test_attempt_of_newer_topology_waits_for_it(stepped_core: SteppedCore) -> None:
    peer_processes = stepped_core.peer_processes
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (NEW_DETOKENIZER, Tokens)):
        peer_processes.bind(worker, accepts)
    capacity = Capacity(1, 32, 4, 8, 128)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    peer_processes.send(capacity)
    request = admit(RequestIds(0, 1).take(), PROMPT, 6)
    peer_processes.send(request)
    stepped_core.deliver(3)
    device = FakeExecutor(capacity, KV)
    while len(device.results) < 2:
        for plan in peer_processes.receive_all(EXECUTOR):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
    peer_processes.send(device.results.popleft())
    peer_processes.send(changed(request, attempt=1, topology=2))
    stepped_core.deliver(2)
    peer_processes.send(device.results.popleft())
    peer_processes.publish(EXECUTOR, NEW_DETOKENIZER, FRONTEND)
    stepped_core.deliver(2)
    received: list[object] = []
    while len(received) < 2:
        received += peer_processes.receive_all(NEW_DETOKENIZER)
    replay, tokens = received
    assert isinstance(replay, Tokens) and isinstance(tokens, Tokens)
    (opened,) = replay.opens
    assert (len(codec.unpack_i32(opened.output_ids)), opened.num_seen, opened.attempt) == (1, 0, 1)
    assert list(codec.unpack_i32(tokens.first_indexes)) == [1]


def test_resume_of_tokens_lost_with_executor_is_answered(stepped_core: SteppedCore) -> None:
    peer_processes, resume_token = stepped_core.peer_processes, ResumeToken(b"k" * 16, b"")
    for worker, accepts in ((EXECUTOR, StepPlan), (FRONTEND, Resumed)):
        peer_processes.bind(worker, accepts)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    peer_processes.send(Capacity(1, 32, 4, 8, 128))
    request_id = RequestIds(0, 1).take()
    peer_processes.send(changed(admit(request_id, PROMPT, 6), resume_token=resume_token))
    stepped_core.deliver(3)
    peer_processes.send(Resume(5, 0, request_id, resume_token.key))
    stepped_core.deliver(1)
    peer_processes.publish(NEW_EXECUTOR, DETOKENIZER, FRONTEND)
    peer_processes.send(Capacity(2, 32, 4, 8, 128))
    stepped_core.deliver(2)
    answer = peer_processes.receive(FRONTEND)
    assert isinstance(answer, Resumed) and answer.query_id == 5 and answer.choices == [(0, b"")]


def test_invalid_admit_ends_with_error(stepped_core: SteppedCore) -> None:
    peer_processes, ids = stepped_core.peer_processes, RequestIds(0, 1)
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (FRONTEND, Unknown | Failed)):
        peer_processes.bind(worker, accepts)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    first, second = ids.take(), ids.take()
    peer_processes.send(admit(first, [VOCAB], 6))  # before the capacity is known
    stepped_core.deliver(2)
    failed = peer_processes.receive(FRONTEND)
    assert isinstance(failed, Failed) and (failed.request_id, failed.code) == (first, ErrorCode.INTERNAL)
    peer_processes.send(Capacity(1, 32, 4, 8, 128))
    peer_processes.send(admit(second, PROMPT, 6))
    stepped_core.deliver(2)
    peer_processes.send(changed(admit(second, [VOCAB], 6), attempt=1))
    stepped_core.deliver(1)
    failed = peer_processes.receive(FRONTEND)
    assert isinstance(failed, Failed) and failed.request_id == second
    assert stepped_core.core.engine.num_live == 0, "the earlier attempt is dropped too"
    third = ids.take()
    peer_processes.send(admit(third, PROMPT, 6))
    peer_processes.send(Cancel([third], 1 << 40))
    stepped_core.deliver(2)
    assert stepped_core.core.engine.num_live == 0


def test_invalid_result_ends_requests_of_its_step(stepped_core: SteppedCore) -> None:
    peer_processes, ids = stepped_core.peer_processes, RequestIds(0, 1)
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (FRONTEND, Failed)):
        peer_processes.bind(worker, accepts)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    capacity = Capacity(1, 32, 4, 8, 128)
    peer_processes.send(capacity)
    lost = admit(ids.take(2), PROMPT, 6)
    lost.spec.params.n = 2
    peer_processes.send(lost)
    stepped_core.deliver(3)
    device = FakeExecutor(capacity, KV)
    kept = admit(ids.take(), PROMPT[:3], 4)
    peer_processes.send(kept)
    for plan in peer_processes.receive_all(EXECUTOR):
        assert isinstance(plan, StepPlan)
        device.execute(plan)
    peer_processes.send(msgspec.structs.replace(device.results.popleft(), token_ids=codec.pack_i32([VOCAB])))
    stepped_core.deliver(2)
    assert list(stepped_core.core.engine.live) == [kept.request_id]
    failed: list[object] = []
    while len(failed) < 2:
        failed += peer_processes.receive_all(FRONTEND)
    assert [(f.request_id, f.code) for f in failed if isinstance(f, Failed)] == [
        (lost.request_id, ErrorCode.INTERNAL),
        (lost.request_id + 1, ErrorCode.INTERNAL),
    ]
    while device.results or stepped_core.core.engine.num_live:
        if device.results:
            peer_processes.send(device.results.popleft())
            stepped_core.deliver(1)
        for plan in peer_processes.inboxes[EXECUTOR].wait(0.01):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
    received: list[Tokens] = []
    while not any(any(message.finishes) for message in received):
        received += [
            message for message in peer_processes.receive_all(DETOKENIZER) if isinstance(message, Tokens)
        ]
    assert outputs(received)[-4:] == expected(PROMPT[:3], 3, 4, stops=())


def test_oversized_tokens_message_ends_its_requests(
    stepped_core: SteppedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_frames(monkeypatch, Role.DETOKENIZER, 200)
    peer_processes, ids = stepped_core.peer_processes, RequestIds(0, 1)
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (FRONTEND, Failed)):
        peer_processes.bind(worker, accepts)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    capacity = Capacity(1, 32, 4, 8, 128)
    peer_processes.send(capacity)
    request = changed(admit(ids.take(), [5] * 90, 6), return_prompt_ids=True)
    peer_processes.send(request)
    stepped_core.deliver(3)
    device = FakeExecutor(capacity, KV)
    num_results = 0
    while stepped_core.core.engine.num_live:
        for plan in peer_processes.receive_all(EXECUTOR):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
        while device.results:
            peer_processes.send(device.results.popleft())
            stepped_core.deliver(1)
            num_results += 1
    failed = peer_processes.receive(FRONTEND)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == (request.request_id, ErrorCode.TOO_LARGE)
    assert num_results <= 4


def test_invalid_capacity_ends_core(stepped_core: SteppedCore) -> None:
    stepped_core.peer_processes.send(Capacity(1, 0, 4, 8, 128))
    with pytest.raises(RuntimeError, match="Capacity message is invalid"):
        stepped_core.deliver(1)


def test_core_closes_when_final_account_fails(stepped_core: SteppedCore) -> None:
    def report_of() -> tuple[int, int]:
        raise RuntimeError("no account")

    closed: list[bool] = []
    stepped_core.peer_processes.send(Stop())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepped_core.core, "_account", report_of)
        patch.setattr(stepped_core.core.process, "close", lambda: closed.append(True))
        with pytest.raises(RuntimeError, match="no account"):
            stepped_core.core.run()
    assert closed == [True]


def test_cancel_of_unknown_request_is_answered(stepped_core: SteppedCore) -> None:
    peer_processes = stepped_core.peer_processes
    peer_processes.bind(FRONTEND, Unknown)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    peer_processes.send(Capacity(1, 32, 4, 8, 128))
    request_id = RequestIds(0, 1).take()
    peer_processes.send(Cancel([request_id], 0))
    stepped_core.deliver(3)
    assert peer_processes.receive(FRONTEND) == Unknown(codec.pack_i64([request_id]))


def in_flight_report(attempts: dict[int, int]) -> InFlightReport:
    return InFlightReport(FRONTEND, 0, 0, codec.pack_i64(attempts), codec.pack_i32(attempts.values()))


def test_request_missing_from_core_is_reported(stepped_core: SteppedCore) -> None:
    """The request left its tokenizer; only the second report in which it is missing counts."""
    peer_processes, ids = stepped_core.peer_processes, RequestIds(0, 1)
    peer_processes.bind(FRONTEND, Unknown)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    active, newer, lost, pending = (ids.take() for _ in range(4))
    reported = {active: 0, newer: 1, lost: 0}
    for _ in range(2):
        peer_processes.send(
            in_flight_report(reported)
        )  # before the capacity is known, all messages are queued
    peer_processes.send(Capacity(1, 32, 4, 8, 128))
    for request_id in (active, newer):
        peer_processes.send(admit(request_id, PROMPT, 6))
    for report_of in (reported, {active: 0}, reported, reported):
        peer_processes.send(in_flight_report(report_of))
    stepped_core.deliver(10)
    answer = peer_processes.receive(FRONTEND)
    assert answer == Unknown(codec.pack_i64([newer, lost])), "newest attempt of one request is missing"
    peer_processes.send(changed(admit(pending, PROMPT, 6), topology=9))
    for _ in range(2):
        peer_processes.send(in_flight_report({pending: 0}))
    peer_processes.send(Cancel([ids.take()], 0))
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    stepped_core.deliver(5)
    assert peer_processes.inboxes[FRONTEND].wait(0.05) == [], "requests waiting for a topology are kept"


def test_request_without_frontend_is_dropped(stepped_core: SteppedCore) -> None:
    peer_processes, ids = stepped_core.peer_processes, RequestIds(0, 1)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    peer_processes.send(Capacity(1, 32, 4, 8, 128))
    kept, orphan = ids.take(), ids.take()
    for request_id in (kept, orphan):
        peer_processes.send(admit(request_id, PROMPT, 6))
    peer_processes.send(Live(FRONTEND, codec.pack_i64([kept])))
    stepped_core.deliver(5)
    assert stepped_core.core.engine.num_live == 2
    peer_processes.send(Live(FRONTEND, codec.pack_i64([kept])))
    stepped_core.deliver(1)
    assert list(stepped_core.core.engine.live) == [kept]


@pytest.fixture
def small_pending_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAX_EARLY", 1)


@pytest.mark.usefixtures("small_pending_queue")
@pytest.mark.parametrize("kind", [Admit, Cancel])
def test_full_pending_queue_rejects_message(stepped_core: SteppedCore, kind: type) -> None:
    peer_processes, ids = stepped_core.peer_processes, RequestIds(0, 1)
    peer_processes.bind(FRONTEND, Unknown | Failed)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    peer_processes.send(changed(admit(ids.take(), PROMPT, 6), topology=9))
    second = ids.take()
    peer_processes.send(admit(second, PROMPT, 6) if kind is Admit else Cancel([second], 0))
    stepped_core.deliver(3)
    answer = peer_processes.receive(FRONTEND)
    if kind is Cancel:
        assert answer == Unknown(codec.pack_i64([second]))
    else:
        assert isinstance(answer, Failed)
        assert (answer.request_id, answer.code) == (second, ErrorCode.OVERLOADED)


def test_executor_receives_no_plan_before_its_capacity(stepped_core: SteppedCore) -> None:
    peer_processes, engine = stepped_core.peer_processes, stepped_core.core.engine
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    peer_processes.send(Capacity(1, 32, 4, 8, 128))
    stepped_core.deliver(2)
    peer_processes.publish(NEW_EXECUTOR, DETOKENIZER, FRONTEND)
    peer_processes.send(admit(RequestIds(0, 1).take(), PROMPT, 6))
    stepped_core.deliver(2)
    assert engine.state is not None and not engine.state.in_flight
    assert stepped_core.core.process.pending == 0  # the core itself is not stalled
    peer_processes.send(Capacity(2, 32, 4, 8, 128))
    stepped_core.deliver(1)
    assert len(engine.state.in_flight) == 2 and stepped_core.core.process.pending == 1


def test_waiting_for_peer_kv_is_not_pending_work(config: EngineConfig) -> None:
    peers = KvPeersConfig(role="decode", allowed=["127.0.0.1"], staging_bytes=1 << 20)
    cache = CacheConfig(memory_bytes=0, peers=peers)
    with contextlib.closing(SteppedCore(msgspec.structs.replace(config, cache=cache))) as stepped_core:
        peer_processes, core = stepped_core.peer_processes, stepped_core.core
        peer_processes.bind(EXECUTOR, StepPlan | KvTierRequests)
        peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
        peer_processes.send(Capacity(1, 32, 4, 8, 128, tiers=[TierCapacity("peer", 8)]))
        kv_transfer = KvTransfer(peer="127.0.0.1:5600", num_blocks=2)
        peer_processes.send(changed(admit(RequestIds(0, 1).take(), PROMPT, 6), kv_transfer=kv_transfer))
        stepped_core.deliver(3)
        orders = peer_processes.receive(EXECUTOR)
        assert isinstance(orders, KvTierRequests)
        assert (core.engine.num_live, core.process.pending) == (1, 0)
        peer_processes.send(KvTierResults(1, 0, "peer", missed=orders.fetches[0].host_blocks))
        stepped_core.deliver(1)
        assert core.engine.state is not None and core.engine.state.in_flight
        assert core.process.pending == 1


@pytest.mark.parametrize("num_outputs", [3, 6])
def test_iteration_metrics(stepped_core: SteppedCore, num_outputs: int) -> None:
    """A step planned before an early stop was known is not counted."""
    outputs = expected(PROMPT, 3, 6, stops=())
    stops = () if num_outputs == 6 else (outputs[num_outputs - 1],)
    assert not stops or outputs.index(stops[0]) == num_outputs - 1
    peer_processes = stepped_core.peer_processes
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens)):
        peer_processes.bind(worker, accepts)
    capacity = Capacity(1, 32, 4, 8, 128)
    peer_processes.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    peer_processes.send(capacity)
    stepped_core.deliver(2)
    names: set[str] = set()
    while "cache_config_info" not in names:  # cache_config_info is reported at once
        for beat in peer_processes.receive_all(SUPERVISOR):
            if isinstance(beat, Heartbeat) and beat.metrics:
                names = {series.name for series in decode_snapshot(beat.metrics).gauges}
    peer_processes.send(admit(RequestIds(0, 1).take(), PROMPT, 6, stops))
    stepped_core.deliver(1)
    device = FakeExecutor(capacity, KV)
    while stepped_core.core.engine.num_live or (
        stepped_core.core.engine.state and stepped_core.core.engine.state.in_flight
    ):
        for plan in peer_processes.receive_all(EXECUTOR):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
            peer_processes.send(device.results.popleft())
            stepped_core.deliver(1)
    metrics = decode_snapshot(stepped_core.core.process.metrics.encoded())
    (steps,) = [series for series in metrics.histograms if series.name == "iteration_tokens_total"]
    num_steps = num_outputs + bool(stops)
    assert (sum(steps.counts), steps.total) == (num_steps, len(PROMPT) + num_outputs)
