"""KV back ends that lose, delay or reject transfers: missing KV is recomputed, requests end once, and all blocks are freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from quintet.core import recurrent_state
from quintet.core.kv import chunks
from quintet.core.kv.prefetch import FETCH_TIMEOUT_NS, MAX_FETCH_NS
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_tiers import KvTierResults, TierName
from quintet.wire.request import KvTransfer
from tests.core.fake import World
from tests.core.fake_model import expected
from tests.core.kv.fake_back_ends import PEER, FakeBackEnd, FakeDisk, FakePeers, FakeStore
from tests.core.trace import assert_served, random_trace

PROMPT = list(range(10, 31))
"""21 tokens: five full blocks of four, and a token to compute; two chunks of two blocks."""


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 8)
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 8)


@dataclass
class Case:
    """A back end that holds the blocks of `PROMPT`, and a core that does not."""

    tier: TierName
    back_end: FakeBackEnd
    world: World
    num_blocks: int
    """Blocks of the prompt that it provides."""

    def admit(self, request_id: int, prompt: list[int] | None = None, **options: object) -> None:
        """Send a request that may use the back end."""
        if self.tier == "peer":
            options["kv_transfer"] = KvTransfer(peer=PEER, num_blocks=5)
        self.world.admit(request_id, prompt or PROMPT, max_tokens=5, ignore_eos=True, **options)

    def serve(self, request_id: int) -> int | None:
        """Run a request to its end; return how many of its tokens were cached."""
        self.admit(request_id)
        self.world.run()
        outcome = self.world.outcomes[request_id]
        assert outcome.tokens == expected(PROMPT, request_id, 5, stops=()) and outcome.num_endings == 1
        self.world.assert_idle()
        return outcome.num_cached

    def begin_fetch(self, request_id: int) -> None:
        """Send a request; its blocks have been requested, and the results are not delivered."""
        self.admit(request_id)
        while self.state.pool.tiers.remote[0].fetches.requests.get(request_id) is None:
            assert self.world.plan() is None and (
                self.state.pool.tiers.remote[0].fetches.requests.get(request_id)
                or self.back_end.answer(self.world.engine)
            )
        assert self.world.plan() is None and self.back_end.answers

    def miss_deadline(self) -> None:
        self.world.now += FETCH_TIMEOUT_NS + 1
        self.world.apply(self.world.engine.expire(self.world.now))

    @property
    def state(self) -> SchedulerState:
        assert self.world.engine.state is not None
        return self.world.engine.state

    def count(self, name: str) -> int:
        """Return one of the back end's counters."""
        return self.state.counters.transfers[self.tier, name]


def disk_case(num_staging_blocks: int = 8) -> Case:
    disk = FakeDisk(20, num_staging_blocks)
    world = World(disk=disk)
    world.admit(1, PROMPT, max_tokens=5, ignore_eos=True)
    world.run()
    return Case("disk", disk, world, 5)


def peer_case(num_staging_blocks: int = 8) -> Case:
    peers = FakePeers(num_staging_blocks)
    world = World(peers=peers)
    world.admit(1, PROMPT, max_tokens=1, ignore_eos=True, kv_transfer=KvTransfer(offers=True))
    world.run()
    assert world.plan() is None, "only tier requests are left"
    return Case("peer", peers, world, 5)


def store_case(num_staging_blocks: int = 8) -> Case:
    store = FakeStore(num_staging_blocks)
    world = World(store=store)
    world.admit(1, PROMPT, max_tokens=5, ignore_eos=True)
    world.run()
    return Case("store", store, world, 4)


class HostCase(Case):
    """Host memory: requests are preempted, and all their blocks on the device evicted."""

    def admit(self, request_id: int, prompt: list[int] | None = None, **options: object) -> None:
        super().admit(request_id, prompt, **options)
        self.world.step()
        (request,) = self.state.running
        self.state.preempt(request)
        for block in [*self.state.pool.index.block_of.values()]:
            self.state.pool.evict(block)

    def serve(self, request_id: int) -> int:
        """Run a request to its end; return how many of its tokens were restored."""
        num_before = self.world.executor.num_swapped_in
        super().serve(request_id)
        return (self.world.executor.num_swapped_in - num_before) * self.world.block_size

    def begin_fetch(self, request_id: int) -> None:
        self.admit(request_id)


def host_case(num_staging_blocks: int = 8) -> Case:
    world = World(num_host_blocks=num_staging_blocks, max_steps_in_flight=1)
    return HostCase("host", FakeBackEnd(), world, 5)


REMOTE: list[Callable[..., Case]] = [disk_case, peer_case, store_case]
MAKERS = [*REMOTE, host_case]


def begun(make: Callable[..., Case]) -> Case:
    made = make()
    made.world.new_core()
    return made


@pytest.fixture(params=REMOTE)
def case(request: pytest.FixtureRequest) -> Case:
    """A back end with messages."""
    return begun(request.param)


@pytest.fixture(params=MAKERS)
def any_case(request: pytest.FixtureRequest) -> Case:
    return begun(request.param)


def test_contents_survive_executor_and_core(case: Case) -> None:
    assert case.serve(2) == 4 * case.num_blocks and case.count("fetched_blocks") == case.num_blocks
    assert case.serve(3) == 20, "blocks are cached on the device"
    assert case.count("fetched_blocks") == case.num_blocks
    case.world.new_executor()
    assert case.serve(4) == 4 * case.num_blocks


def test_lost_blocks_are_computed(case: Case) -> None:
    case.back_end.is_losing = True
    assert case.serve(2) == 0
    assert (case.count("missed_blocks"), case.count("fetched_blocks")) == (case.num_blocks, 0)


def test_waiting_request_is_overtaken(case: Case) -> None:
    case.admit(2)
    case.world.admit(3, [7, 8, 9], max_tokens=5, ignore_eos=True)
    case.world.plan()
    assert [request.request_id for request in case.state.running] == [3]
    case.world.run()
    assert case.world.outcomes[2].num_cached == 4 * case.num_blocks


def test_hanging_back_end_times_out(case: Case) -> None:
    case.begin_fetch(2)
    late = case.back_end.answers.popleft()
    case.miss_deadline()
    case.world.run()
    assert case.world.outcomes[2].num_cached == 0
    case.world.engine.kv_results(late)
    case.world.assert_idle()


def test_hanging_back_end_times_out_for_all_requests(case: Case) -> None:
    case.begin_fetch(2)
    case.admit(3)
    assert case.world.plan() is None
    case.back_end.answers.clear()
    case.miss_deadline()
    case.world.run()
    assert [case.world.outcomes[request_id].num_endings for request_id in (2, 3)] == [1, 1]


def test_slow_back_end_is_limited_by_total_timeout(case: Case) -> None:
    case.begin_fetch(2)
    whole = case.back_end.answers.popleft()
    start_ns, blocks = case.world.now, [*unpack_i32(whole.fetched)] * 9
    while any(tier.is_awaited for tier in case.state.pool.tiers.remote):
        case.world.now += FETCH_TIMEOUT_NS // 2
        case.world.apply(case.world.engine.expire(case.world.now))
        one = pack_i32([blocks.pop()]) if len(blocks) > 9 * case.num_blocks - 3 else b""
        case.world.engine.kv_results(
            KvTierResults(whole.executor_epoch, whole.tables_epoch, case.tier, fetched=one)
        )
        case.world.plan()
    assert FETCH_TIMEOUT_NS < case.world.now - start_ns <= MAX_FETCH_NS + FETCH_TIMEOUT_NS
    case.world.run()
    assert case.world.outcomes[2].num_cached == 0
    case.world.engine.kv_results(whole)
    case.world.assert_idle()


@pytest.mark.parametrize("make", MAKERS)
def test_cancel_during_fetch_frees_all_blocks(make: Callable[..., Case]) -> None:
    case = make(num_staging_blocks=10)
    case.world.new_core()
    case.begin_fetch(2)
    case.world.cancel(2)
    assert case.serve(3) == 4 * case.num_blocks, "late answers serve another request"


def test_executor_lost_during_fetch(case: Case) -> None:
    case.begin_fetch(2)
    late = case.back_end.answers.popleft()
    case.world.new_executor()
    case.world.engine.kv_results(late)
    case.world.run()
    assert case.world.outcomes[2].num_cached == 4 * case.num_blocks
    case.world.assert_idle()


@pytest.mark.parametrize("make", MAKERS)
def test_few_staging_blocks_fetch_the_head(make: Callable[..., Case]) -> None:
    case = make(num_staging_blocks=2)
    case.world.new_core()
    assert case.serve(2) == 8


def test_requests_without_cache_reads_skip_it(any_case: Case) -> None:
    any_case.admit(2, skip_reading_prefix_cache=True)
    assert any_case.world.plan() is not None
    any_case.world.run()
    assert any_case.count("fetched_blocks") == any_case.world.executor.num_swapped_in == 0


def test_results_of_another_back_end_are_ignored(case: Case) -> None:
    case.begin_fetch(2)
    real = case.back_end.answers[0]
    other: TierName = "disk" if case.tier != "disk" else "peer"
    lie = KvTierResults(real.executor_epoch, real.tables_epoch, other, [b"k" * 32], fetched=real.fetched)
    case.world.engine.kv_results(lie)
    assert case.world.plan() is None, "the request still waits"
    case.world.run()
    assert case.world.outcomes[2].num_cached == 4 * case.num_blocks


def test_executor_loss_forgets_host_memory() -> None:
    case = host_case()
    case.begin_fetch(2)
    case.world.new_executor()
    case.world.run()  # the fake executor raises a KeyError for a block that it never received
    assert case.world.executor.num_swapped_in == 0
    assert case.world.outcomes[2].tokens == expected(PROMPT, 2, 5, stops=())
    assert case.serve(3) == 20


def test_unexpected_results_are_ignored(any_case: Case) -> None:
    """Unknown host blocks, stored objects, lost objects and searches."""
    case = any_case
    capacity, first = case.world.executor.capacity, case.world.executor.capacity.num_host_blocks
    numbers = pack_i32(range(first, first + 8))
    lie = KvTierResults(
        *(capacity.executor_epoch, capacity.tables_epoch, case.tier, [b"k" * 32], [b"l" * 32]),
        fetched=numbers,
        missed=numbers,
        lost=[b"m" * 32],
    )
    case.world.engine.kv_results(lie)
    assert case.serve(2) in (0, 4 * case.num_blocks)


FAKES: list[tuple[str, Callable[[int], FakeBackEnd | int]]] = [
    ("num_host_blocks", lambda seed: 1 + 9 * (seed % 3)),
    ("disk", lambda seed: FakeDisk(6 + 30 * (seed % 2), 4 + 12 * (seed % 3))),
    ("peers", lambda seed: FakePeers(4 + 12 * (seed % 3))),
    ("store", lambda seed: FakeStore(4 + 12 * (seed % 3), waiting_blocks=1 + 99 * (seed % 2))),
]


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("name", "make"), FAKES)
def test_random_traces(
    name: str, make: Callable[[int], FakeBackEnd | int], seed: int, in_groups: bool
) -> None:
    """The back end is the only one, or a disk or host memory is another one."""
    back_ends = {"num_host_blocks": 5 * (seed % 2), name: make(seed)}
    if seed % 4 == 1:
        back_ends.setdefault("disk", FakeDisk(20))
    poisonous = 0.05 if seed % 4 == 0 else 0.0
    trace = random_trace(seed, 250, 1 + seed % 3, poisonous, in_groups=in_groups, **back_ends)  # type: ignore[arg-type]
    assert_served(*trace)


@pytest.mark.parametrize("make", [lambda: FakeDisk(60, 30), lambda: FakePeers(30), lambda: FakeStore(30)])
def test_random_traces_fetch(make: Callable[[], FakeBackEnd]) -> None:
    names = {"disk": "disk", "peer": "peers", "store": "store"}
    back_ends = [make() for _ in range(16)]
    for seed, each in enumerate(back_ends):
        random_trace(seed, 250, 2, in_groups=seed % 2 == 1, **{names[each.tier]: each})  # type: ignore[arg-type]
    assert sum(each.num_fetched > 0 for each in back_ends) > 2, [each.num_fetched for each in back_ends]
