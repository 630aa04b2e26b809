"""KV on disk, in the core: blocks survive executors and cores, requests wait for reads, misses are recomputed."""

from __future__ import annotations

from quintet.core.kv.disk_pool import DiskPool
from quintet.core.kv.groups import Groups
from quintet.core.kv.prefetch import FETCH_TIMEOUT_NS, OUTLIER_FACTOR, TRY_EVERY
from quintet.core.kv.tier import Wanted
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_spec import KvGroup, KvSpec
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, TierCapacity
from tests.core.fake import World
from tests.core.fake_model import expected
from tests.core.kv.fake_back_ends import FakeDisk
from tests.core.trace import assert_served, random_trace

PROMPT = list(range(10, 31))
"""21 tokens: five full blocks of four, and a token to compute."""
A, B, C = (bytes([letter]) * 32 for letter in b"abc")


def state_of(world: World) -> SchedulerState:
    assert world.engine.state is not None
    return world.engine.state


def serve(world: World, request_id: int = 1, prompt: list[int] | None = None) -> int | None:
    """Run a request to its end; return how many of its tokens were cached."""
    tokens = PROMPT if prompt is None else prompt
    world.admit(request_id, tokens, max_tokens=5, ignore_eos=True)
    world.run()
    assert world.outcomes[request_id].tokens == expected(tokens, request_id, 5, stops=())
    world.assert_idle()
    return world.outcomes[request_id].num_cached


def test_blocks_on_disk_are_not_stored_again() -> None:
    world = World(disk=FakeDisk(20))
    serve(world)
    num_stored = state_of(world).counters.transfers["disk", "stored_objects"]
    assert num_stored == 6, "blocks of the answer are stored too"
    world.new_executor()
    serve(world, 2)
    assert state_of(world).counters.transfers["disk", "stored_objects"] == num_stored + 1, (
        "block of another answer"
    )


def test_missing_block_is_recomputed() -> None:
    disk = FakeDisk(20)
    world = World(disk=disk)
    serve(world)
    world.new_core()
    disk.is_losing = True
    assert serve(world, 2) == 0
    counters = state_of(world).counters
    assert (counters.transfers["disk", "missed_blocks"], counters.transfers["disk", "fetched_blocks"]) == (
        5,
        0,
    )
    disk.is_losing = False
    world.new_core()
    assert serve(world, 3) == 20, "blocks were stored again"


def test_full_disk_evicts_least_recently_used() -> None:
    world = World(disk=FakeDisk(6))
    serve(world, 1)
    serve(world, 2, [*range(50, 71)])
    world.new_core()
    assert serve(world, 3) == 0
    world.new_core()
    serve(world, 4)
    assert state_of(world).counters.transfers["disk", "missed_blocks"] == 0


def test_prefix_cached_on_the_device_stays_on_disk() -> None:
    """Reuse on the device counts as a use of the copy on disk."""
    world = World(disk=FakeDisk(11))
    serve(world, 1)
    serve(world, 2, [*range(50, 67)])
    serve(world, 3)
    serve(world, 4, [*range(90, 107)])
    world.new_core()
    assert serve(world, 5) == 20


def test_state_reassigned_by_its_plan_is_not_stored() -> None:
    """A preempted request names a state, and its block is given to another request in the same plan."""
    disk = FakeDisk(200, num_staging_blocks=30)
    assert_served(*random_trace(50066, 250, 1 + 50066 % 2, 0.0, 5 * (50066 % 3), in_groups=True, disk=disk))


# Unit tests of the disk pool.


def pool_of(num_places: int, num_staging_blocks: int, first: int = 0) -> DiskPool:
    groups = Groups(KvSpec([KvGroup("full", [0])], 1, 64, 4), 64)
    return DiskPool(groups, 8, first, TierCapacity("disk", num_staging_blocks, num_places))


def requests_of(pool: DiskPool, now_ns: int = 0, *keys: bytes) -> KvTierRequests:
    """Return the requests, with these keys on the device."""
    requests = pool.requests(0, {key: block for block, key in enumerate(keys)}, now_ns)
    return KvTierRequests(0, "disk") if requests is None else requests


def store(pool: DiskPool, *keys: bytes) -> None:
    for key in keys:
        pool.store([key])
    stored = [key for each in requests_of(pool, 0, *keys).stores for key in each.keys]
    pool.apply(KvTierResults(1, 0, "disk", stored=stored))
    pool.check(set())


def ask(pool: DiskPool, request_id: int, *keys: bytes) -> None:
    wanted = Wanted(request_id, (0, request_id), len(keys))
    places = pool.look_up(wanted, keys, None)
    assert pool.fetch(wanted, {key: places[key] for key in keys}, 4, whole=False)


def fetched(*host_blocks: int, fetch_ns: int = 8) -> KvTierResults:
    num_fetches = len(host_blocks)
    return KvTierResults(
        1, 0, "disk", fetched=pack_i32(host_blocks), num_fetches=num_fetches, fetch_ns=fetch_ns
    )


def test_least_recently_used_is_evicted() -> None:
    pool = pool_of(2, 2)
    store(pool, A, B)
    pool.use([A])
    store(pool, C)
    assert [*pool.held] == [A, C]


def test_an_evicted_block_is_deleted_before_the_next_is_stored() -> None:
    pool = pool_of(1, 1)
    store(pool, A)
    pool.store([B])
    requests = requests_of(pool, 0, B)
    assert requests.drops == [A] and [key for each in requests.stores for key in each.keys] == [B]


def test_progress_renews_timeout_of_later_fetches_only() -> None:
    pool = pool_of(3, 3)
    store(pool, A, B, C)
    for request_id, key in enumerate((A, B, C)):
        ask(pool, request_id, key)
        requests_of(pool)
    pool.apply(fetched(pool.fetches.host_blocks.block_of[B]))
    requests_of(pool, FETCH_TIMEOUT_NS)
    pool.expire(FETCH_TIMEOUT_NS + 1)
    waits = {request_id for request_id, wish in pool.fetches.requests.items() if wish.pending}
    assert waits == {2}, "answers are ordered, so the first one is lost"
    pool.expire(2 * FETCH_TIMEOUT_NS + 1)
    assert not pool.fetches.requests[2].pending


def test_one_slow_read_does_not_stop_reads() -> None:
    pool = pool_of(1, 1)
    pool.fetch_cost.each_ns = 10.0
    store(pool, A)
    ask(pool, 1, A)
    pool.apply(fetched(0, fetch_ns=10**12))
    assert pool.fetch_cost.each_ns == (3 * 10 + OUTLIER_FACTOR * 10) / 4
    assert pool.fetch_cost.is_cheaper(1, 28)
    tries = [pool.fetch_cost.is_cheaper(1, 20) for _ in range(TRY_EVERY)]
    assert tries == [False] * (TRY_EVERY - 1) + [True] and pool.fetch_cost.each_ns is None


def test_unstored_block_is_a_miss() -> None:
    pool = pool_of(2, 2)
    pool.store([A])
    assert requests_of(pool, 0, A).stores
    pool.apply(KvTierResults(1, 0, "disk", unstored=[A]))
    pool.check(set())
    assert not pool.held and not pool.storing


def test_evicted_block_is_not_stored() -> None:
    pool = pool_of(2, 2)
    pool.store([A])
    assert not requests_of(pool).stores and not pool.storing


def test_imported_block_is_not_also_stored() -> None:
    pool = pool_of(2, 2)
    pool.store([A])
    assert pool.reserve(A)
    assert not requests_of(pool, 0, A).stores
    pool.check(set())


def test_deleted_block_is_dropped_alone() -> None:
    pool = pool_of(2, 2)
    store(pool, A)
    pool.drop(A)
    assert requests_of(pool) == KvTierRequests(0, "disk", drops=[A])


def test_block_being_written_is_not_reused() -> None:
    """Neither when its request was cancelled, nor when another request wants the same content."""
    pool = pool_of(2, 2, first=5)
    store(pool, A)
    for request_id, host_block in ((1, 5), (2, 6)):
        ask(pool, request_id, A)
        (fetch,) = requests_of(pool).fetches
        assert fetch.keys == [A]
        assert [*unpack_i32(fetch.host_blocks)] == [host_block]
        if request_id == 1:
            pool.forget(1)
            pool.fetches.free_left()
    pool.apply(fetched(5))
    assert pool.fetches.fetch(2, [A]) is None
    pool.apply(fetched(6))
    assert pool.fetches.fetch(2, [A]) == [6] and pool.fetch_cost.each_ns == 8
    pool.fetches.free_left()
    assert pool.fetches.host_blocks.free == [5]
    pool.check({2})
