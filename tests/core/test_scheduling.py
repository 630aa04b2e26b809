"""Scheduling: token budget, order, preemption, overlapped steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quintet.core import scheduler
from quintet.core.features.chunked_prefill import whole_or_wait
from quintet.core.hooks import Feature, flatten
from quintet.core.requests.request import Status
from quintet.wire import codec
from quintet.wire.step import StepPlan

from .fake import World
from .fake_model import expected
from .trace import random_trace

PROMPT = list(range(10, 21))


def rows(world: World, plan: StepPlan | None) -> dict[int, int]:
    """Return request id -> number of tokens computed, for the rows of a plan."""
    assert plan is not None
    ids = {slot: slot_state.row.request_id for slot, slot_state in world.executor.slot_states.items()}
    return {
        ids[slot]: count
        for slot, count in zip(codec.unpack_i32(plan.slots), codec.unpack_i32(plan.counts), strict=True)
    }


def running(world: World) -> list[int]:
    state = world.engine.state
    assert state is not None
    return [request.request_id for request in state.running]


def waiting(world: World) -> list[int]:
    state = world.engine.state
    assert state is not None
    return [request.request_id for request in state.waiting]


def distinct(count: int, start: int = 3) -> list[int]:
    return list(range(start, start + count))


def test_budget_is_shared_and_decoding_comes_first() -> None:
    world = World(max_num_batched_tokens=16, max_steps_in_flight=1)
    world.admit(1, distinct(30), ignore_eos=True)
    world.admit(2, distinct(4, 50), ignore_eos=True)
    assert rows(world, world.plan()) == {1: 16}
    world.commit()
    assert rows(world, world.plan()) == {1: 14, 2: 2}
    world.commit()
    assert rows(world, world.plan()) == {1: 1, 2: 2}
    world.commit()
    world.admit(3, distinct(40, 80), ignore_eos=True)
    assert rows(world, world.plan()) == {1: 1, 2: 1, 3: 14}


def test_requests_that_would_make_a_plan_too_large_wait_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_NEW_ROW_BYTES", 4000)
    world = World(max_steps_in_flight=1)
    bias = dict.fromkeys(range(150), 1.5)  # more than 1500 bytes
    for request_id in range(1, 6):
        world.admit(request_id, distinct(4, 10 * request_id), logit_bias=bias, ignore_eos=True)
    assert set(rows(world, world.plan())) == {1, 2, 3}
    world.commit()
    assert set(rows(world, world.plan())) == {1, 2, 3, 4, 5}


def test_pipelined_steps_alternate_requests() -> None:
    """With five decoding requests, a step has at most three, and none of those in the previous step."""
    world = World(max_steps_in_flight=3, stages=2)
    for request_id in range(1, 6):
        world.admit(request_id, distinct(4, 10 * request_id), ignore_eos=True)
    assert set(rows(world, world.plan())) == {1, 2, 3, 4, 5}
    assert world.plan() is None, "every request has a sample in flight"
    world.commit()
    schedule = [set(rows(world, world.plan())) for _ in range(3)]
    assert schedule == [{1, 2, 3}, {4, 5}, {1, 2, 3}]


@pytest.mark.parametrize(("stages", "num_requests", "sizes"), [(3, 4, [2, 1, 1]), (4, 5, [2, 1, 1, 1])])
def test_no_stage_idles_while_requests_are_active(stages: int, num_requests: int, sizes: list[int]) -> None:
    world = World(max_steps_in_flight=stages + 1, stages=stages)
    for request_id in range(1, num_requests + 1):
        world.admit(request_id, distinct(4, 10 * request_id), ignore_eos=True)
    world.plan()
    world.commit()
    schedule = [set(rows(world, world.plan())) for _ in range(stages)]
    assert [len(scheduled) for scheduled in schedule] == sizes
    assert set.union(*schedule) == set(range(1, num_requests + 1))
    for scheduled in schedule * 2:
        world.commit()
        assert set(rows(world, world.plan())) == scheduled, "the cycle repeats"


def test_long_prompts_share_budget_only_with_other_requests() -> None:
    world = World(long_prefill_token_threshold=10, max_steps_in_flight=1)
    world.admit(1, distinct(40))
    assert rows(world, world.plan()) == {1: 40}
    world.commit()
    world.admit(2, distinct(40, 50))
    assert rows(world, world.plan())[2] == 10


def test_unchunked_prompt_is_whole_or_waits() -> None:
    world = World(enable_chunked_prefill=False, max_num_batched_tokens=16, max_steps_in_flight=1)
    world.admit(1, distinct(12), ignore_eos=True)
    world.admit(2, distinct(12, 50), ignore_eos=True)
    world.admit(3, distinct(2, 90), ignore_eos=True)
    assert rows(world, world.plan()) == {1: 12}
    world.commit()
    assert rows(world, world.plan()) == {1: 1, 2: 12, 3: 2}


def test_unchunked_preempted_request_may_exceed_budget() -> None:
    world = World(enable_chunked_prefill=False, max_num_batched_tokens=16, max_steps_in_flight=2)
    for request_id in (1, 2, 3):
        world.admit(request_id, distinct(14, 20 * request_id), max_tokens=30, ignore_eos=True)
    for _ in range(12):
        world.step()
    world.new_executor()
    world.run()
    for request_id in (1, 2, 3):
        prompt = distinct(14, 20 * request_id)
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, 30, stops=())


def test_fcfs_ignores_priority() -> None:
    world = World(slots=1)
    for request_id, priority in ((1, 5), (2, 0), (3, -5)):
        world.admit(request_id, PROMPT, priority=priority)
    world.step()
    assert (running(world), waiting(world)) == ([1], [2, 3])


def test_priority_order_of_entry() -> None:
    world = World(slots=1, policy="priority", max_steps_in_flight=1)
    for request_id, priority in ((1, 5), (2, 0), (3, -5), (4, 0)):
        world.admit(request_id, PROMPT, priority=priority, max_tokens=1)
    order = []
    while (plan := world.plan()) is not None:
        order += list(rows(world, plan))
        world.commit()
    assert order == [3, 2, 4, 1]


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", 3), ("priority", 1)])
def test_preemption_victim_is_lowest_ranked(policy: str, victim: int) -> None:
    world = World(num_blocks=9, block_size=4, policy=policy, max_steps_in_flight=1, prefix_caching=False)
    for request_id, priority in ((1, 7), (2, 0), (3, 0)):
        world.admit(
            request_id, distinct(12, 20 * request_id), priority=priority, max_tokens=12, ignore_eos=True
        )
    world.plan()
    world.commit()
    assert sorted(running(world)) == [1, 2, 3]
    world.plan()
    assert waiting(world) == [victim]
    world.run()
    for request_id in (1, 2, 3):
        prompt = distinct(12, 20 * request_id)
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, 12, stops=())
    world.assert_idle()


def test_no_admission_while_blocks_are_short() -> None:
    world = World(num_blocks=7, block_size=4, max_steps_in_flight=2, prefix_caching=False)
    world.admit(1, distinct(12), max_tokens=12, ignore_eos=True)
    world.admit(2, distinct(14, 50), max_tokens=12, ignore_eos=True)
    world.plan()
    world.admit(3, distinct(2, 90), max_tokens=2, ignore_eos=True)
    plan = world.plan()  # 1 needs a block, none is free; 2 is preempted, its blocks are fenced
    assert plan is None
    assert (running(world), waiting(world)) == ([1], [2, 3])
    world.commit()
    assert rows(world, world.plan()) == {1: 1}
    assert waiting(world) == [2, 3]  # 3 would fit, but is not next in the queue
    world.run()
    world.assert_idle()


def test_all_requests_finish_with_blocks_for_one() -> None:
    world = World(num_blocks=6, block_size=4, max_steps_in_flight=2)
    for request_id in range(1, 8):
        world.admit(request_id, distinct(9, 10 * request_id), max_tokens=15, ignore_eos=True)
    world.run(max_steps=400)
    for request_id in range(1, 8):
        prompt = distinct(9, 10 * request_id)
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, 15, stops=())
    world.assert_idle()


def test_slots_are_reused_with_new_generations() -> None:
    world = World(slots=1, max_steps_in_flight=2)
    world.admit(1, PROMPT, max_tokens=1)
    world.admit(2, PROMPT, max_tokens=1)
    first = world.plan()
    world.commit()
    second = world.plan()
    assert first is not None and second is not None
    assert codec.unpack_i32(second.freed) == codec.unpack_i32(first.slots)
    assert second.new_rows[0].slot == first.new_rows[0].slot
    assert second.new_rows[0].generation > first.new_rows[0].generation


def test_running_requests_do_not_exceed_token_budget() -> None:
    world = World(max_num_batched_tokens=3, slots=8)
    state = world.engine.state
    assert state is not None
    stall = Feature(
        "stall", limit_tokens=lambda state, request, wanted, budget: request.status is Status.WAITING
    )
    state.hooks = flatten([stall])  # one token on admission, then none: the budget stays free
    for request_id in range(1, 8):
        world.admit(request_id, PROMPT)
    for _ in range(3):
        world.step()
    assert running(world) == [1, 2, 3]


def test_all_requests_short_of_a_block_are_reserved_one() -> None:
    world = World(num_blocks=4, block_size=4, max_steps_in_flight=2, prefix_caching=False)
    for request_id in range(1, 5):
        world.admit(request_id, distinct(4, 10 * request_id), ignore_eos=True)
    world.plan()
    assert world.plan() is None  # all four need a second block; two are preempted, their blocks are fenced
    assert (running(world), waiting(world)) == ([1, 2], [3, 4])
    world.commit()
    assert rows(world, world.plan()) == {1: 1, 2: 1}
    world.run()
    world.assert_idle()


def test_admission_keeps_the_watermark_free() -> None:
    world = World(num_blocks=200, max_steps_in_flight=1, max_num_batched_tokens=1000, max_model_len=1000)
    world.admit(1, distinct(40), ignore_eos=True, max_tokens=20)  # 10 blocks, 11 from the second step on
    world.step()
    world.admit(2, [7] * (4 * 188), ignore_eos=True, max_tokens=4)  # one block above the watermark
    world.step()
    assert waiting(world) == [2]
    world.cancel(2)
    world.admit(3, [7] * (4 * 187), ignore_eos=True, max_tokens=4)
    world.step()
    assert running(world) == [1, 3]


def test_unchunked_partial_request_continues_with_others() -> None:
    world = World(enable_chunked_prefill=False, max_num_batched_tokens=16, max_steps_in_flight=1)
    world.admit(1, PROMPT)
    state = world.engine.state
    assert state is not None
    request = state.waiting[0]
    assert whole_or_wait(state, request, 10, 5) == 0
    assert whole_or_wait(state, request, 17, 5) == 17
    world.step()
    assert whole_or_wait(state, request, 10, 5) == 10


def test_idle_engine_plans_nothing() -> None:
    world = World()
    assert world.plan() is None
    world.admit(1, PROMPT, max_tokens=1)
    world.run()
    assert world.plan() is None and len(world.plans) == 1


def outputs_of(worlds: Sequence[World]) -> list[dict[int, list[int]]]:
    return [
        {request_id: outcome.tokens for request_id, outcome in world.outcomes.items()} for world in worlds
    ]


def test_overlap_changes_no_token() -> None:
    worlds = [World(max_steps_in_flight=depth, num_blocks=24) for depth in (1, 2, 3)]
    for world in worlds:
        for request_id in range(1, 12):
            world.admit(request_id * 10, PROMPT[: request_id % 7 + 1], n=request_id % 3 + 1, max_tokens=12)
        world.run()
    synchronous, *overlapped = outputs_of(worlds)
    assert all(outputs == synchronous for outputs in overlapped)


def test_same_trace_gives_same_plans() -> None:
    assert random_trace(3, 200, 2)[0].plans == random_trace(3, 200, 2)[0].plans
