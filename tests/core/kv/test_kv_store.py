"""KV in a shared store, in the core: chunks of other servers are found and fetched; misses are recomputed."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.core import recurrent_state
from quintet.core.kv import chunks, store_pool
from quintet.core.kv.chunks import Chunks
from quintet.core.kv.groups import Groups
from quintet.core.kv.prefetch import FETCH_TIMEOUT_NS
from quintet.core.kv.store_pool import PAUSE_NS, StorePool
from quintet.core.kv.tier import Wanted
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.codec import pack_i32
from quintet.wire.kv_spec import KvGroup, KvSpec
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, Search, SearchResult, TierCapacity
from tests.core.fake import World
from tests.core.fake_model import expected
from tests.core.kv.fake_back_ends import FakeDisk, FakeStore

PROMPT = list(range(10, 31))
"""21 tokens: five full blocks of four, and a token to compute; two chunks of two blocks."""
KEYS = [bytes([letter]) * 32 for letter in b"abcdefgh"]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 8)
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 8)


def state_of(world: World) -> SchedulerState:
    assert world.engine.state is not None
    return world.engine.state


def pool_of(world: World) -> StorePool:
    (pool,) = (tier for tier in state_of(world).pool.tiers.remote if isinstance(tier, StorePool))
    return pool


def serve(world: World, request_id: int = 1, prompt: list[int] | None = None) -> int | None:
    """Run a request to its end; return how many of its tokens were cached."""
    tokens = PROMPT if prompt is None else prompt
    world.admit(request_id, tokens, max_tokens=5, ignore_eos=True)
    world.run()
    assert world.outcomes[request_id].tokens == expected(tokens, request_id, 5, stops=())
    world.assert_idle()
    return world.outcomes[request_id].num_cached


@pytest.mark.parametrize("lost", ["executor", "core", "server"])
def test_stored_prefix_is_reused(lost: str) -> None:
    store = FakeStore()
    world = World(store=store)
    assert serve(world) == 0
    if lost == "executor":
        world.new_executor()
    elif lost == "core":
        world.new_core()
    else:
        world = World(store=store)
    assert serve(world, 2) == 16, "two whole chunks"
    assert state_of(world).counters.transfers["store", "fetched_blocks"] == 4
    assert serve(world, 3) == 20, "blocks are cached on the device"
    assert state_of(world).counters.transfers["store", "fetched_blocks"] == 4


def test_no_duplicate_puts_or_lookups() -> None:
    store = FakeStore()
    world = World(store=store)
    serve(world)
    assert store.num_stores == 3 and store.num_searches == 1, "one chunk of the answer too"
    world.new_executor()
    serve(world, 2)
    assert store.num_stores == 4 and store.num_searches == 2, "chunk of another answer"
    serve(world, 3)
    assert store.num_searches == 2, "all findable blocks are cached"


def test_many_lookups_are_split_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_pool, "MAX_NAMES", 3)
    store = FakeStore()
    prompts = [[letter, *PROMPT] for letter in range(1, 6)]
    for request_id, prompt in enumerate(prompts):
        serve(World(store=store), request_id, prompt)
    world = World(store=store)
    submit, sizes = store.submit, list[int]()

    def counted(requests: KvTierRequests, *rest: Any) -> None:
        sizes.append(len(requests.searches))
        submit(requests, *rest)

    monkeypatch.setattr(store, "submit", counted)
    for request_id, prompt in enumerate(prompts):
        world.admit(request_id, prompt, max_tokens=5, ignore_eos=True)
    world.run()
    world.assert_idle()
    assert [size for size in sizes if size] == [2, 2, 1]


def test_lost_chunks_are_recomputed_and_put_again() -> None:
    store = FakeStore()
    serve(World(store=store))
    world = World(store=store)
    store.is_losing = True
    assert serve(world, 2) == 0
    counters = state_of(world).counters
    assert (counters.transfers["store", "missed_blocks"], counters.transfers["store", "fetched_blocks"]) == (
        4,
        0,
    )
    store.is_losing = False
    store.runs.clear()
    world.new_executor()
    assert serve(world, 3) == 0
    assert serve(World(store=store), 4) == 16


@pytest.mark.parametrize("what", ["search", "get"])
def test_hanging_store_times_out_and_is_paused(what: str) -> None:
    store = FakeStore()
    serve(World(store=store))
    world = World(store=store)
    world.admit(2, PROMPT, max_tokens=5, ignore_eos=True)
    assert world.plan() is None and store.answers
    if what == "get":
        store.answer(world.engine)
        assert world.plan() is None and store.answers
    late = store.answers.popleft()
    world.now += FETCH_TIMEOUT_NS + 1
    world.apply(world.engine.expire(world.now))
    world.run()
    assert world.outcomes[2].num_cached == 0
    num_searches = store.num_searches
    world.engine.kv_results(late)
    serve(world, 3, PROMPT[::-1])
    assert store.num_searches == num_searches


def test_lookup_miss_does_not_wait_for_other_chunks() -> None:
    store = FakeStore()
    serve(World(store=store))
    world = World(store=store)
    pool_of(world).mark_present(next(iter(store.runs)))
    world.admit(2, PROMPT, max_tokens=5, ignore_eos=True)
    assert world.plan() is None and store.num_searches == 2
    world.now += FETCH_TIMEOUT_NS + 1
    world.apply(world.engine.expire(world.now))
    assert world.plan() is not None and not store.num_fetched
    world.run()


def test_long_steps_do_not_pause_the_store() -> None:
    store = FakeStore()
    serve(World(store=store))
    world = World(store=store)
    world.admit(1, [7, 8, 9], max_tokens=50, ignore_eos=True)
    world.step()
    state_of(world).throughput.note_computing(1000, 10**12)
    world.admit(2, PROMPT, max_tokens=5, ignore_eos=True)
    world.plan()
    assert state_of(world).in_flight and pool_of(world).lookups[2].is_pending
    world.now += FETCH_TIMEOUT_NS + 1
    world.apply(world.engine.expire(world.now))
    assert pool_of(world).lookups[2].is_pending and not pool_of(world).is_paused, "steps of a second a token"
    world.run()
    assert world.outcomes[2].num_cached == 16


def test_paused_store_receives_no_lookups() -> None:
    groups = Groups(KvSpec([KvGroup("full", [0])], 1, 64, 4), 64)
    pool = StorePool(groups, 8, 0, TierCapacity("store", 8, max_storing_blocks=100))
    assert pool.look_up(Wanted(1, (0, 1), 2), KEYS[:2], None) is None
    searches = [Search(1, [[KEYS[1]]])]
    assert pool.requests(0, {}, 0) == KvTierRequests(0, "store", searches=searches)
    pool.expire(FETCH_TIMEOUT_NS)
    assert pool.lookups[1].is_pending and not pool.is_paused
    pool.expire(FETCH_TIMEOUT_NS + 1)
    assert not pool.lookups[1].is_pending and pool.is_paused
    found = [SearchResult(1, pack_i32([1]))]
    pool.apply(KvTierResults(1, 0, "store", found=found, search_ns=5, num_searches=1))
    assert not pool.known, "late answer: the lookup has timed out"
    pool.expire(FETCH_TIMEOUT_NS + 1 + PAUSE_NS)
    assert not pool.is_paused


def test_blocks_to_put_wait_on_the_device() -> None:
    store = FakeStore(waiting_blocks=1)
    world = World(store=store)
    world.admit(1, PROMPT, max_tokens=5, ignore_eos=True)
    assert world.plan() is None and store.answer(world.engine), "a lookup was sent"
    assert world.plan() is not None and store.num_stores == 1, "one chunk at a time"
    world.plan()
    assert store.num_stores == 1
    assert store.answer(world.engine)
    world.plan()
    assert store.num_stores == 2
    world.run()
    world.plan()
    assert store.num_stores == 3


def test_full_store_is_retried_after_recomputation() -> None:
    store = FakeStore()
    store.is_full = True
    world = World(store=store)
    serve(world)
    assert not store.runs and state_of(world).counters.transfers["store", "unstored_objects"] == 3
    store.is_full = False
    world.new_executor()
    serve(world, 2)
    assert serve(World(store=store), 3) == 16


def test_lookups_slower_than_compute_stop() -> None:
    store = FakeStore()
    world = World(store=store)
    serve(world)
    pool_of(world).known.clear()
    pool_of(world).search_cost.each_ns = 1e15
    state_of(world).throughput.note_computing(1000, 1000)
    num_searches = store.num_searches
    serve(world, 2, [*PROMPT[::-1]])
    assert store.num_searches == num_searches


def test_blocks_on_disk_are_not_fetched_from_store() -> None:
    store, disk = FakeStore(), FakeDisk(20)
    serve(World(store=store, disk=disk))
    world = World(store=store, disk=disk)
    num_searches = store.num_searches
    assert serve(world, 2) == 20
    assert store.num_searches == num_searches and store.num_fetched == 0


def test_store_prefix_shorter_than_disk_is_not_fetched() -> None:
    store, disk = FakeStore(), FakeDisk(20)
    disk.past = store.past
    serve(World(store=store), prompt=PROMPT[:9])
    serve(World(disk=disk), prompt=PROMPT[:13])
    world = World(store=store, disk=disk)
    assert serve(world, 2) == 12
    assert store.num_searches == 2 and store.num_fetched == 0


# Unit tests of chunks.


@pytest.mark.parametrize(
    ("block_size", "keep_every", "length", "every"),
    [(16, 1024, 16, 64), (48, 1024, 2, 22), (256, 1024, 1, 4), (544, 1024, 1, 2), (1, 8, 8, 8)],
)
def test_chunk_length_aligns_with_states(
    block_size: int, keep_every: int, length: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 256)
    runs = Chunks.of(Groups(KvSpec([KvGroup("full", [0])], 1, 64, block_size), 64), keep_every)
    assert (runs.num_blocks, runs.every) == (length, every)


def test_chunks_are_named_by_their_last_blocks() -> None:
    kv = KvSpec([KvGroup("full", [0]), KvGroup("state", [1])], 1, 64, 4)
    runs = Chunks(Groups(kv, 64), 2, 4)
    assert runs.chains(KEYS[:7]) == [
        [KEYS[1], KEYS[3], KEYS[5]],
        [KEYS[3] + b"\1\0"],
    ]
    assert runs.keys(KEYS, 0, 1) == KEYS[2:4]
    assert runs.keys(KEYS, 1, 0) == [KEYS[3] + b"\1\0"]
