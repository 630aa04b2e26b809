"""Swapping to host memory: a preempted request copies its blocks back where that is cheaper than recomputation."""

from __future__ import annotations

import msgspec
import pytest

from quintet.core.hooks import FEATURES
from quintet.core.kv.groups import Groups
from quintet.core.kv.host_pool import HostPool
from quintet.core.kv.pool import BlockPool
from quintet.core.kv.prefix import run_of
from quintet.core.kv.swap_pool import SwapPool
from quintet.core.kv.tiers import Tiers
from quintet.core.scheduler_state import SchedulerState
from quintet.wire import codec
from quintet.wire.kv_spec import KvGroup, KvSpec
from quintet.wire.kv_tiers import TierCapacity
from quintet.wire.step import StepPlan
from tests.core.fake import NS_PER_TOKEN, World
from tests.core.fake_model import expected

BLOCK_BYTES = 64
"""KV size of the model of `World`."""
WITHOUT = {name: module for name, module in FEATURES.items() if name != "kv_connector"}
PROMPTS = {1: list(range(10, 21)), 2: list(range(30, 41)), 3: list(range(50, 61))}
"""Three requests of 11 tokens; each needs 3 blocks of 4, and 6 at its end."""


def crowded(**options: object) -> World:
    """Return a world in which the last request loses its blocks to the first two."""
    return World(**{"num_blocks": 14, "max_steps_in_flight": 2, "num_host_blocks": 20, **options})


def play(world: World) -> SchedulerState:
    """Run the three requests to their ends; return the state."""
    for request_id, prompt in PROMPTS.items():
        world.admit(request_id, prompt, max_tokens=13, ignore_eos=True)
    world.run()
    for request_id, prompt in PROMPTS.items():
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, 13, stops=())
    world.assert_idle()
    assert world.engine.state is not None
    return world.engine.state


def host_of(state: SchedulerState) -> HostPool:
    (tier,) = state.pool.tiers.all
    return tier.fetches.host_blocks


def num_computed(world: World) -> int:
    plans = [msgspec.msgpack.decode(plan, type=StepPlan) for plan in world.plans]
    return sum(sum(codec.unpack_i32(plan.counts)) for plan in plans)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_request_resumes_from_host_blocks(caching: bool, depth: int) -> None:
    world = crowded(prefix_caching=caching, max_steps_in_flight=depth)
    state = play(world)
    assert state.counters.preemptions > 0
    assert world.executor.num_swapped_in > 0
    again = crowded(prefix_caching=caching, max_steps_in_flight=depth, num_host_blocks=0)
    play(again)
    assert again.executor.num_swapped_out == 0
    saved = num_computed(again) - num_computed(world)
    assert saved >= world.executor.num_swapped_in * world.block_size


def test_swap_metrics_match_plans() -> None:
    world = crowded()
    counters = play(world).counters
    assert counters.swap_out_blocks == world.executor.num_swapped_out
    assert counters.swap_in_blocks == world.executor.num_swapped_in
    assert counters.swap_out_bytes == BLOCK_BYTES * counters.swap_out_blocks
    assert counters.swap_in_bytes == BLOCK_BYTES * counters.swap_in_blocks


def test_blocks_in_the_prefix_cache_are_not_copied() -> None:
    """Its blocks are evicted one at a time and copied only then; the rest is shared again."""
    world = crowded(prefix_caching=True)
    play(world)
    eager = crowded(prefix_caching=False)
    play(eager)
    assert 0 < world.executor.num_swapped_out < eager.executor.num_swapped_out


@pytest.mark.parametrize("features", [FEATURES, WITHOUT])
def test_without_host_blocks_plans_are_byte_identical(features: dict[str, str]) -> None:
    plain = World(num_blocks=14, features=WITHOUT)
    play(plain)
    world = World(num_blocks=14, features=features)
    play(world)
    assert world.plans == plain.plans


def test_host_blocks_without_the_feature_change_nothing() -> None:
    plain = World(num_blocks=14, features=WITHOUT)
    play(plain)
    world = crowded(features=WITHOUT)
    play(world)
    assert world.plans == plain.plans


def test_recomputes_when_cheaper_than_copying() -> None:
    """The fake executor takes a millisecond a token; four tokens copied out and in cost two copies."""
    block_ns = 4 * NS_PER_TOKEN
    worlds = {}
    for share in (0.3, 0.6, 1.1):  # share of compute time that one copy takes
        speed = int(BLOCK_BYTES * 1e9 / (share * block_ns))
        # throughput is measured in steps of at least 32 tokens: the prompts, together
        worlds[share] = crowded(prefix_caching=False, swap_bytes_per_s=speed)
        play(worlds[share])
    assert worlds[0.3].executor.num_swapped_in > 0
    assert worlds[0.6].executor.num_swapped_out == 0, "copying both ways costs more"
    assert worlds[1.1].executor.num_swapped_out == 0


@pytest.mark.parametrize("options", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}])
def test_requests_without_cache_reads_do_not_swap(options: dict[str, object]) -> None:
    world = crowded()
    for request_id, prompt in PROMPTS.items():
        world.admit(request_id, prompt, max_tokens=13, ignore_eos=True, **options)
    world.run()
    world.assert_idle()
    assert world.executor.num_swapped_out == 0


@pytest.mark.parametrize("caching", [True, False])
def test_host_blocks_are_shared_with_prefix_caching(caching: bool) -> None:
    """Without the prefix cache, KV may depend on more than the tokens before it."""
    world = World(prefix_caching=caching, max_steps_in_flight=1, num_host_blocks=20)
    state = world.engine.state
    assert state is not None
    for request_id in (1, 2):
        world.admit(request_id, PROMPTS[1])
    world.step()
    for request in list(state.running):
        state.preempt(request)
    first, second = (host_of(state).keys_of[request_id] for request_id in (1, 2))
    assert len(first) == len(second) == 2
    assert (first == second) == caching
    assert set(first).isdisjoint(second) != caching
    world.run()
    world.assert_idle()


def test_new_executor_has_an_empty_host_pool() -> None:
    world = crowded(prefix_caching=False)
    for request_id, prompt in PROMPTS.items():
        world.admit(request_id, prompt, max_tokens=13, ignore_eos=True)
    while not world.executor.num_swapped_out:
        world.step()
    world.new_executor()
    assert world.engine.state is not None
    assert not host_of(world.engine.state).block_of
    world.run()  # the fake executor raises a KeyError for a block that it never received
    for request_id, prompt in PROMPTS.items():
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, 13, stops=())
    world.assert_idle()


def test_cancel_frees_host_blocks() -> None:
    world = crowded(prefix_caching=False)
    for request_id, prompt in PROMPTS.items():
        world.admit(request_id, prompt, max_tokens=13, ignore_eos=True)
    state = world.engine.state
    assert state is not None
    while not host_of(state).block_of:
        world.step()
    (waiting,) = state.waiting
    world.cancel(waiting.request_id)
    assert not host_of(state).wanted
    world.run()
    world.assert_idle()


# Unit tests of the host pool.


def test_full_host_pool_keeps_the_head() -> None:
    host = HostPool(3)
    assert host.want(1, [b"a", b"b"]) == [b"a", b"b"]
    assert host.want(2, [b"a", b"c", b"d"]) == [b"a", b"c"]
    assert host.want(3, [b"e"]) == []
    host.on_evict(b"d", 7)
    assert not host.block_of, "no request needs the block"
    host.on_evict(b"c", 5)
    host.on_evict(b"a", 4)
    assert [*host.block_of] == [b"c", b"a"]
    assert run_of([b"a", b"c", b"d"], host.block_of) == [host.block_of[b"a"], host.block_of[b"c"]]
    assert run_of([b"b", b"a"], host.block_of) == []


def test_host_block_is_kept_while_requests_need_it() -> None:
    host = HostPool(2)
    host.want(1, [b"a", b"b"])
    host.want(2, [b"a"])
    host.on_evict(b"a", 4)
    host.on_evict(b"b", 5)
    assert host.take_copies() == [4, host.block_of[b"a"], 5, host.block_of[b"b"]]
    host.forget(1)
    assert list(host.block_of) == [b"a"]
    host.forget(2)
    assert not host.block_of and not host.wanted


def test_block_read_by_a_plan_is_not_overwritten_by_it() -> None:
    host = HostPool(1)
    host.want(1, [b"a"])
    host.on_evict(b"a", 4)
    assert len(host.take_copies()) == 2
    host.forget(1)  # it is resumed: the plan being built copies the block back
    assert host.want(2, [b"b"]) == []
    host.take_copies()
    assert host.want(2, [b"b"]) == [b"b"]


def test_request_resumed_by_the_copying_plan_gets_its_copy() -> None:
    host = HostPool(2)
    host.want(1, [b"a"])
    host.on_evict(b"a", 4)
    block = host.block_of[b"a"]
    host.forget(1)
    host.want(2, [b"b"])
    host.on_evict(b"b", 5)
    assert host.take_copies() == [4, block, 5, host.block_of[b"b"]]
    assert host.free == [block]


def test_evicted_block_is_saved_when_needed() -> None:
    groups = Groups(KvSpec([KvGroup("full", [0])], 1, 64, 4), 64)
    swap = SwapPool(groups, 8, 0, TierCapacity("host", 2, 2))
    pool, host = BlockPool(2, Tiers([swap])), swap.fetches.host_blocks
    blocks = [pool.take(), pool.take()]
    for key, block in zip((b"a", b"b"), blocks, strict=True):
        pool.index.register(key, block)
    host.want(1, [b"a"])
    pool.release(blocks, None)
    assert pool.take() == blocks[1], "tail is evicted first"
    assert not host.copies
    assert pool.take() == blocks[0]
    assert host.copies == {host.block_of[b"a"]: blocks[0]}
