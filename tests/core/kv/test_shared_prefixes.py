"""Concurrent requests with a shared prefix: it is computed once, even if its first request ends."""

from __future__ import annotations

import msgspec
import pytest

from quintet.wire import codec
from quintet.wire.step import StepPlan
from tests.core.fake import World
from tests.core.fake_model import expected

PREFIX = [3 + i * i % 190 for i in range(1024)]
NUM_REQUESTS, NUM_OWN, NUM_OUTPUTS = 32, 24, 4
ONCE = len(PREFIX) + NUM_REQUESTS * (NUM_OWN + NUM_OUTPUTS - 1)


def prompt_of(request_id: int) -> list[int]:
    return PREFIX + [3 + request_id * 5 % 190] * NUM_OWN


def crowd(num_requests: int = NUM_REQUESTS, **options: object) -> World:
    """Make a world with these requests waiting."""
    settings: dict[str, object] = {"max_num_batched_tokens": 4096, "max_model_len": 2048, "num_blocks": 400}
    world = World(block_size=16, slots=NUM_REQUESTS, **(settings | options))
    for request_id in range(1, num_requests + 1):
        world.admit(request_id, prompt_of(request_id), max_tokens=NUM_OUTPUTS, ignore_eos=True)
    return world


def num_computed(world: World) -> int:
    plans = [msgspec.msgpack.decode(plan, type=StepPlan) for plan in world.plans]
    return sum(sum(codec.unpack_i32(plan.counts)) for plan in plans)


def assert_served(world: World, *request_ids: int) -> None:
    for request_id in request_ids:
        outputs = expected(prompt_of(request_id), request_id, NUM_OUTPUTS, stops=())
        assert world.outcomes[request_id].tokens == outputs
    world.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [4096, 500])
def test_shared_prefix_is_computed_once(depth: int, budget: int) -> None:
    world = crowd(max_steps_in_flight=depth, max_num_batched_tokens=budget)
    world.run()
    assert num_computed(world) == ONCE
    assert_served(world, *range(1, NUM_REQUESTS + 1))


def test_one_step_computes_prefix_and_suffixes() -> None:
    world = crowd()
    plan = world.plan()
    assert plan is not None
    counts = list(codec.unpack_i32(plan.counts))
    assert counts == [len(PREFIX) + NUM_OWN] + [NUM_OWN] * (NUM_REQUESTS - 1)
    assert sum(plan.samples) == NUM_REQUESTS


def test_cached_tokens_include_a_prefix_in_flight() -> None:
    world = crowd(2)
    world.run()
    assert [world.outcomes[request_id].num_cached for request_id in (1, 2)] == [0, len(PREFIX)]


def test_requests_compute_prefix_chunks_for_each_other() -> None:
    world = crowd(long_prefill_token_threshold=160)
    plan = world.plan()
    assert plan is not None
    starts = list(codec.unpack_i32(plan.starts))
    assert starts[:8] == [0, 160, 320, 480, 640, 800, 960, len(PREFIX)]
    world.run()
    assert num_computed(world) == ONCE
    state = world.engine.state
    assert state is not None and state.counters.computed_tokens == ONCE
    assert sum(ending.stats.num_computed for ending in state.endings) == len(PREFIX) + NUM_REQUESTS * NUM_OWN
    assert_served(world, *range(1, NUM_REQUESTS + 1))


def test_sharing_ends_where_prompts_part() -> None:
    world = World(block_size=4, max_steps_in_flight=1)
    for request_id, num_common in ((1, 24), (2, 24), (3, 13), (4, 3)):
        world.admit(request_id, [*PREFIX[:num_common], *[100 + request_id] * 4], max_tokens=1)
    plan = world.plan()
    assert plan is not None
    assert list(codec.unpack_i32(plan.starts)) == [0, 24, 12, 0]
    world.run()


@pytest.mark.parametrize("how", ["cancel", "stop_hit"])
def test_prefix_of_an_ended_request_is_still_written(how: str) -> None:
    world = crowd(1)
    world.plan()
    if how == "cancel":
        world.cancel(1)
    else:
        world.engine.stop_hit([1], [0], world.tick())
    world.admit(2, prompt_of(2), max_tokens=NUM_OUTPUTS, ignore_eos=True)
    plan = world.plan()
    assert plan is not None and list(codec.unpack_i32(plan.counts)) == [NUM_OWN]
    world.run()
    assert_served(world, 2)


def test_lost_executor_invalidates_prefixes_in_flight() -> None:
    world = crowd(2)
    world.plan()
    world.new_executor()
    plan = world.plan()  # of the first alone: suspects are tried one at a time
    assert plan is not None and list(codec.unpack_i32(plan.starts)) == [0]
    world.run()
    assert_served(world, 1, 2)


def test_preempted_request_reuses_its_blocks_in_flight() -> None:
    world = World(num_blocks=9, block_size=4, max_steps_in_flight=2)
    prompts = {request_id: PREFIX[20 * request_id : 20 * request_id + 15] for request_id in (1, 2)}
    for request_id, prompt in prompts.items():
        world.admit(request_id, prompt, max_tokens=6, ignore_eos=True)
    world.run()
    for request_id, prompt in prompts.items():
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, 6, stops=())
    assert world.engine.state is not None and world.engine.state.counters.preemptions
    assert num_computed(world) < sum(map(len, prompts.values())) + 2 * 5 + 15
    world.assert_idle()


def test_distinct_prompts_are_planned_as_without_a_cache() -> None:
    worlds = [World(prefix_caching=prefix_caching, num_blocks=200) for prefix_caching in (True, False)]
    for world in worlds:
        for request_id in range(1, 9):
            world.admit(request_id, [100 + request_id, *PREFIX[: 9 * request_id]], max_tokens=12)
        world.run()
    assert worlds[0].plans == worlds[1].plans
