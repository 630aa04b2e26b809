"""The core as a process: its sockets, and what it does when a neighbour is replaced."""

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
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults
from quintet.wire.messages import (
    Admit,
    Cancel,
    Failed,
    InFlightReport,
    Live,
    Reclaim,
    Reclaimed,
    Tokens,
    Unknown,
)
from quintet.wire.metrics import decode_snapshot
from quintet.wire.params import SamplingParams
from quintet.wire.request import KvTransfer, RequestSpec, ResumeToken
from quintet.wire.step import Capacity, StepPlan
from quintet.wire.supervision import Heartbeat, ProcessSlot, Ready, SlotState, Stop, Topology
from tests.wire.respec import changed

from ..small_frames import take_at_most
from .fake import VOCAB, FakeExecutor, expected, make_model

KV = full_layers(1, 1, 2, 4, 4)

ME = WorkerId(Role.CORE, 0, 1)
PROMPT = list(range(20, 30))


class Neighbours:
    """Every process the core talks to, in this one."""

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
def neighbours(config: EngineConfig) -> Iterator[Neighbours]:
    world = Neighbours(config)

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
    neighbours: Neighbours, executor: WorkerId, device: FakeExecutor, detokenizer: WorkerId
) -> list[Tokens]:
    """Execute plans until some request has ended; return what the detokenizer heard."""
    heard: list[Tokens] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for plan in neighbours.inboxes[executor].wait(0.01):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
            neighbours.send(device.results.popleft())
        for message in neighbours.inboxes[detokenizer].wait(0.01):
            assert isinstance(message, Tokens)
            heard.append(message)
            if any(message.finishes):
                return heard
    raise AssertionError(heard)


def admit(request_id: int, prompt: list[int], max_tokens: int, stops: tuple[int, ...] = ()) -> Admit:
    params = SamplingParams(seed=3, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=list(stops))
    now = time.monotonic_ns()
    return Admit(request_id, codec.pack_i32(prompt), RequestSpec(params, now, 0), now)


def outputs(heard: list[Tokens]) -> list[int]:
    return [token for message in heard for token in codec.unpack_i32(message.token_ids)]


def test_serves_a_request_over_sockets(neighbours: Neighbours) -> None:
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (FRONTEND, Failed)):
        neighbours.bind(worker, accepts)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    ids = RequestIds(0, 1)
    neighbours.send(admit(ids.take(), PROMPT, 6))  # before the capacity is known
    neighbours.send(admit(ids.take(), [], 6))
    capacity = Capacity(1, 32, 4, 8, 128)
    neighbours.send(capacity)
    heard = serve(neighbours, EXECUTOR, FakeExecutor(capacity, KV), DETOKENIZER)
    assert outputs(heard) == expected(PROMPT, 3, 6, stops=())
    failed = neighbours.receive(FRONTEND)
    assert isinstance(failed, Failed) and "0 tokens" in failed.message


def test_replaced_executor_and_detokenizer_lose_nothing(neighbours: Neighbours) -> None:
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens)):
        neighbours.bind(worker, accepts)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    capacity = Capacity(1, 32, 4, 8, 128)
    neighbours.send(capacity)
    request = admit(RequestIds(0, 1).take(), PROMPT, 6)
    neighbours.send(request)
    device = FakeExecutor(capacity, KV)
    plan = neighbours.receive_all(EXECUTOR)[0]
    assert isinstance(plan, StepPlan)
    device.execute(plan)
    neighbours.send(device.results.popleft())
    neighbours.receive(DETOKENIZER)  # one token, then both neighbours die
    new_executor, new_detokenizer = WorkerId(Role.EXECUTOR, 0, 2), WorkerId(Role.DETOKENIZER, 0, 2)
    neighbours.bind(new_executor, StepPlan)
    neighbours.bind(new_detokenizer, Tokens)
    neighbours.publish(new_executor, new_detokenizer, FRONTEND)
    capacity = Capacity(2, 32, 4, 8, 128)
    neighbours.send(capacity)
    neighbours.send(changed(request, attempt=1, topology=2))  # the frontend saw nothing yet
    heard = serve(neighbours, new_executor, FakeExecutor(capacity, KV), new_detokenizer)
    wanted = expected(PROMPT, 3, 6, stops=())
    assert list(codec.unpack_i32(heard[0].opens[0].output_ids)) == wanted[:1]
    assert outputs(heard) == wanted[1:]


def test_requests_of_a_replaced_frontend_end(neighbours: Neighbours) -> None:
    neighbours.bind(EXECUTOR, StepPlan)
    neighbours.bind(DETOKENIZER, Tokens)
    other = WorkerId(Role.FRONTEND, 1, 1)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND, other)
    neighbours.send(Capacity(1, 32, 4, 8, 128))
    neighbours.send(admit(RequestIds(0, 1).take(), PROMPT, 6))
    neighbours.send(admit(RequestIds(1, 1).take(), PROMPT, 6))
    deadline = time.monotonic() + 10
    neighbours.publish(EXECUTOR, DETOKENIZER, WorkerId(Role.FRONTEND, 0, 2), other)
    while time.monotonic() < deadline:
        for message in neighbours.receive_all(SUPERVISOR):
            if isinstance(message, Heartbeat) and message.pending == 1:
                return
    raise AssertionError("the request of the dead frontend is still alive")


class Driven:
    """A core without its own thread: the test says when it takes messages."""

    def __init__(self, config: EngineConfig) -> None:
        self.neighbours = Neighbours(config)
        self.core = Core(Process(ME, config, Message))

    def deliver(self, count: int) -> None:
        """Have the core take exactly the next ``count`` messages, in one batch."""
        batch: list[object] = []
        while len(batch) < count:
            batch += self.core.process.receive()
        assert len(batch) == count
        self.core.apply(batch)  # type: ignore[arg-type]

    def close(self) -> None:
        self.core.process.close()
        self.neighbours.close()


@pytest.fixture
def driven(config: EngineConfig) -> Iterator[Driven]:
    with contextlib.closing(Driven(config)) as driven:
        yield driven


NEW_EXECUTOR, NEW_DETOKENIZER = WorkerId(Role.EXECUTOR, 0, 2), WorkerId(Role.DETOKENIZER, 0, 2)


def test_an_attempt_sent_by_a_newer_topology_waits_for_it(driven: Driven) -> None:
    """The frontend may hear of a new detokenizer before this process does."""
    neighbours = driven.neighbours
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (NEW_DETOKENIZER, Tokens)):
        neighbours.bind(worker, accepts)
    capacity = Capacity(1, 32, 4, 8, 128)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    neighbours.send(capacity)
    request = admit(RequestIds(0, 1).take(), PROMPT, 6)
    neighbours.send(request)
    driven.deliver(3)
    device = FakeExecutor(capacity, KV)
    while len(device.results) < 2:
        for plan in neighbours.receive_all(EXECUTOR):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
    neighbours.send(device.results.popleft())
    neighbours.send(changed(request, attempt=1, topology=2))
    driven.deliver(2)
    neighbours.send(device.results.popleft())
    neighbours.publish(EXECUTOR, NEW_DETOKENIZER, FRONTEND)
    driven.deliver(2)
    heard: list[object] = []
    while len(heard) < 2:
        heard += neighbours.receive_all(NEW_DETOKENIZER)
    story, tokens = heard
    assert isinstance(story, Tokens) and isinstance(tokens, Tokens)
    (opened,) = story.opens
    assert (len(codec.unpack_i32(opened.output_ids)), opened.num_seen, opened.attempt) == (1, 0, 1)
    assert list(codec.unpack_i32(tokens.first_indexes)) == [1]


def test_a_question_for_tokens_that_an_executor_took_along_is_answered(driven: Driven) -> None:
    neighbours, claim = driven.neighbours, ResumeToken(b"k" * 16, b"")
    for worker, accepts in ((EXECUTOR, StepPlan), (FRONTEND, Reclaimed)):
        neighbours.bind(worker, accepts)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    neighbours.send(Capacity(1, 32, 4, 8, 128))
    request_id = RequestIds(0, 1).take()
    neighbours.send(changed(admit(request_id, PROMPT, 6), claim=claim))
    driven.deliver(3)
    neighbours.send(Reclaim(5, 0, request_id, claim.key))
    driven.deliver(1)
    neighbours.publish(NEW_EXECUTOR, DETOKENIZER, FRONTEND)
    neighbours.send(Capacity(2, 32, 4, 8, 128))
    driven.deliver(2)
    answer = neighbours.receive(FRONTEND)
    assert isinstance(answer, Reclaimed) and answer.query_id == 5 and answer.choices == [(0, b"")]


def test_a_request_that_is_dropped_on_its_way_in_ends_with_an_error(driven: Driven) -> None:
    neighbours, ids = driven.neighbours, RequestIds(0, 1)
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (FRONTEND, Unknown | Failed)):
        neighbours.bind(worker, accepts)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    first, second = ids.take(), ids.take()
    neighbours.send(admit(first, [VOCAB], 6))  # before the capacity is known
    driven.deliver(2)
    failed = neighbours.receive(FRONTEND)
    assert isinstance(failed, Failed) and (failed.request_id, failed.code) == (first, ErrorCode.INTERNAL)
    neighbours.send(Capacity(1, 32, 4, 8, 128))
    neighbours.send(admit(second, PROMPT, 6))
    driven.deliver(2)
    neighbours.send(changed(admit(second, [VOCAB], 6), attempt=1))
    driven.deliver(1)
    failed = neighbours.receive(FRONTEND)
    assert isinstance(failed, Failed) and failed.request_id == second
    assert driven.core.engine.num_live == 0, "what it was before is not computed either"
    third = ids.take()
    neighbours.send(admit(third, PROMPT, 6))
    neighbours.send(Cancel([third], 1 << 40))
    driven.deliver(2)
    assert driven.core.engine.num_live == 0


def test_a_result_that_is_dropped_ends_the_requests_of_its_step(driven: Driven) -> None:
    neighbours, ids = driven.neighbours, RequestIds(0, 1)
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (FRONTEND, Failed)):
        neighbours.bind(worker, accepts)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    capacity = Capacity(1, 32, 4, 8, 128)
    neighbours.send(capacity)
    lost = admit(ids.take(2), PROMPT, 6)
    lost.spec.params.n = 2
    neighbours.send(lost)
    driven.deliver(3)
    device = FakeExecutor(capacity, KV)
    kept = admit(ids.take(), PROMPT[:3], 4)
    neighbours.send(kept)
    for plan in neighbours.receive_all(EXECUTOR):
        assert isinstance(plan, StepPlan)
        device.execute(plan)
    neighbours.send(msgspec.structs.replace(device.results.popleft(), token_ids=codec.pack_i32([VOCAB])))
    driven.deliver(2)
    assert list(driven.core.engine.live_ids()) == [kept.request_id]
    failed: list[object] = []
    while len(failed) < 2:
        failed += neighbours.receive_all(FRONTEND)
    assert [(f.request_id, f.code) for f in failed if isinstance(f, Failed)] == [
        (lost.request_id, ErrorCode.INTERNAL),
        (lost.request_id + 1, ErrorCode.INTERNAL),
    ]
    while device.results or driven.core.engine.num_live:
        if device.results:
            neighbours.send(device.results.popleft())
            driven.deliver(1)
        for plan in neighbours.inboxes[EXECUTOR].wait(0.01):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
    heard: list[Tokens] = []
    while not any(any(message.finishes) for message in heard):
        heard += [message for message in neighbours.receive_all(DETOKENIZER) if isinstance(message, Tokens)]
    assert outputs(heard)[-4:] == expected(PROMPT[:3], 3, 4, stops=())


def test_tokens_too_large_to_be_told_end_their_requests(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_at_most(monkeypatch, Role.DETOKENIZER, 200)
    neighbours, ids = driven.neighbours, RequestIds(0, 1)
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens), (FRONTEND, Failed)):
        neighbours.bind(worker, accepts)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    capacity = Capacity(1, 32, 4, 8, 128)
    neighbours.send(capacity)
    request = changed(admit(ids.take(), [5] * 90, 6), return_prompt_ids=True)
    neighbours.send(request)
    driven.deliver(3)
    device = FakeExecutor(capacity, KV)
    num_results = 0
    while driven.core.engine.num_live:
        for plan in neighbours.receive_all(EXECUTOR):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
        while device.results:
            neighbours.send(device.results.popleft())
            driven.deliver(1)
            num_results += 1
    failed = neighbours.receive(FRONTEND)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == (request.request_id, ErrorCode.TOO_LARGE)
    assert num_results <= 4


def test_a_capacity_that_cannot_be_ends_the_core(driven: Driven) -> None:
    """It would wait for ever, and everybody for it."""
    driven.neighbours.send(Capacity(1, 0, 4, 8, 128))
    with pytest.raises(RuntimeError, match="Capacity message is invalid"):
        driven.deliver(1)


def test_it_closes_even_where_its_last_account_fails(driven: Driven) -> None:
    def account() -> tuple[int, int]:
        raise RuntimeError("no account")

    closed: list[bool] = []
    driven.neighbours.send(Stop())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driven.core, "_account", account)
        patch.setattr(driven.core.process, "close", lambda: closed.append(True))
        with pytest.raises(RuntimeError, match="no account"):
            driven.core.run()
    assert closed == [True]


def test_the_cancel_of_an_unknown_request_is_answered(driven: Driven) -> None:
    neighbours = driven.neighbours
    neighbours.bind(FRONTEND, Unknown)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    neighbours.send(Capacity(1, 32, 4, 8, 128))
    request_id = RequestIds(0, 1).take()
    neighbours.send(Cancel([request_id], 0))
    driven.deliver(3)
    assert neighbours.receive(FRONTEND) == Unknown(codec.pack_i64([request_id]))


def handed(attempts: dict[int, int]) -> InFlightReport:
    return InFlightReport(FRONTEND, 0, 0, codec.pack_i64(attempts), codec.pack_i32(attempts.values()))


def test_a_request_that_never_arrived_is_found(driven: Driven) -> None:
    """Its tokenizer says that it has left there; in the first account it may be an ending that is on its way."""
    neighbours, ids = driven.neighbours, RequestIds(0, 1)
    neighbours.bind(FRONTEND, Unknown)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    here, newer, lost, early = (ids.take() for _ in range(4))
    named = {here: 0, newer: 1, lost: 0}
    for _ in range(2):
        neighbours.send(handed(named))  # before the capacity is known, everything waits
    neighbours.send(Capacity(1, 32, 4, 8, 128))
    for request_id in (here, newer):
        neighbours.send(admit(request_id, PROMPT, 6))
    for account in (named, {here: 0}, named, named):
        neighbours.send(handed(account))
    driven.deliver(10)
    answer = neighbours.receive(FRONTEND)
    assert answer == Unknown(codec.pack_i64([newer, lost])), "of one, the newest attempt did not come"
    neighbours.send(changed(admit(early, PROMPT, 6), topology=9))
    for _ in range(2):
        neighbours.send(handed({early: 0}))
    neighbours.send(Cancel([ids.take()], 0))
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    driven.deliver(5)
    assert neighbours.inboxes[FRONTEND].wait(0.05) == [], "what waits for a topology is not lost"


def test_what_no_frontend_waits_for_is_given_up(driven: Driven) -> None:
    neighbours, ids = driven.neighbours, RequestIds(0, 1)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    neighbours.send(Capacity(1, 32, 4, 8, 128))
    kept, orphan = ids.take(), ids.take()
    for request_id in (kept, orphan):
        neighbours.send(admit(request_id, PROMPT, 6))
    neighbours.send(Live(FRONTEND, codec.pack_i64([kept])))
    driven.deliver(5)
    assert driven.core.engine.num_live == 2
    neighbours.send(Live(FRONTEND, codec.pack_i64([kept])))
    driven.deliver(1)
    assert list(driven.core.engine.live_ids()) == [kept]


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAX_EARLY", 1)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("kind", [Admit, Cancel])
def test_what_is_too_much_to_wait_is_refused_not_dropped(driven: Driven, kind: type) -> None:
    neighbours, ids = driven.neighbours, RequestIds(0, 1)
    neighbours.bind(FRONTEND, Unknown | Failed)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    neighbours.send(changed(admit(ids.take(), PROMPT, 6), topology=9))
    second = ids.take()
    neighbours.send(admit(second, PROMPT, 6) if kind is Admit else Cancel([second], 0))
    driven.deliver(3)
    answer = neighbours.receive(FRONTEND)
    if kind is Cancel:
        assert answer == Unknown(codec.pack_i64([second]))
    else:
        assert isinstance(answer, Failed)
        assert (answer.request_id, answer.code) == (second, ErrorCode.OVERLOADED)


def test_an_executor_gets_no_plan_before_its_capacity_is_known(driven: Driven) -> None:
    neighbours, engine = driven.neighbours, driven.core.engine
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    neighbours.send(Capacity(1, 32, 4, 8, 128))
    driven.deliver(2)
    neighbours.publish(NEW_EXECUTOR, DETOKENIZER, FRONTEND)
    neighbours.send(admit(RequestIds(0, 1).take(), PROMPT, 6))
    driven.deliver(2)
    assert engine.state is not None and not engine.state.in_flight
    assert driven.core.process.pending == 0  # the wait is not the core's
    neighbours.send(Capacity(2, 32, 4, 8, 128))
    driven.deliver(1)
    assert len(engine.state.in_flight) == 2 and driven.core.process.pending == 1


def test_waiting_for_kv_of_another_server_is_no_stall(config: EngineConfig) -> None:
    peers = KvPeersConfig(role="decode", allowed=["127.0.0.1"], staging_bytes=1 << 20)
    cache = CacheConfig(memory_bytes=0, peers=peers)
    with contextlib.closing(Driven(msgspec.structs.replace(config, cache=cache))) as driven:
        neighbours, core = driven.neighbours, driven.core
        neighbours.bind(EXECUTOR, StepPlan | KvTierRequests)
        neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
        neighbours.send(Capacity(1, 32, 4, 8, 128, num_peer_blocks=8))
        handover = KvTransfer(peer="127.0.0.1:5600", num_blocks=2)
        neighbours.send(changed(admit(RequestIds(0, 1).take(), PROMPT, 6), handover=handover))
        driven.deliver(3)
        orders = neighbours.receive(EXECUTOR)
        assert isinstance(orders, KvTierRequests)
        assert (core.engine.num_live, core.process.pending) == (1, 0)
        neighbours.send(KvTierResults(1, 0, lacking=orders.pulls[0].host_blocks))
        driven.deliver(1)
        assert core.engine.state is not None and core.engine.state.in_flight
        assert core.process.pending == 1


@pytest.mark.parametrize("num_outputs", [3, 6])
def test_its_figures(driven: Driven, num_outputs: int) -> None:
    """A step that was planned before an early end was known computes nothing that counts."""
    outputs = expected(PROMPT, 3, 6, stops=())
    stops = () if num_outputs == 6 else (outputs[num_outputs - 1],)
    assert not stops or outputs.index(stops[0]) == num_outputs - 1
    neighbours = driven.neighbours
    for worker, accepts in ((EXECUTOR, StepPlan), (DETOKENIZER, Tokens)):
        neighbours.bind(worker, accepts)
    capacity = Capacity(1, 32, 4, 8, 128)
    neighbours.publish(EXECUTOR, DETOKENIZER, FRONTEND)
    neighbours.send(capacity)
    driven.deliver(2)
    told: set[str] = set()
    while "cache_config_info" not in told:  # what memory there is, is told at once
        for beat in neighbours.receive_all(SUPERVISOR):
            if isinstance(beat, Heartbeat) and beat.metrics:
                told = {series.name for series in decode_snapshot(beat.metrics).gauges}
    neighbours.send(admit(RequestIds(0, 1).take(), PROMPT, 6, stops))
    driven.deliver(1)
    device = FakeExecutor(capacity, KV)
    while driven.core.engine.num_live or (driven.core.engine.state and driven.core.engine.state.in_flight):
        for plan in neighbours.receive_all(EXECUTOR):
            assert isinstance(plan, StepPlan)
            device.execute(plan)
            neighbours.send(device.results.popleft())
            driven.deliver(1)
    figures = decode_snapshot(driven.core.process.metrics.encoded())
    (steps,) = [series for series in figures.histograms if series.name == "iteration_tokens_total"]
    num_steps = num_outputs + bool(stops)
    assert (sum(steps.counts), steps.total) == (num_steps, len(PROMPT) + num_outputs)
