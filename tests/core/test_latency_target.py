"""Target for step time: the prefill budget is the target minus the decode time, at the measured throughput."""

from __future__ import annotations

from quintet.core.features.latency_target import (
    FIRST_TOKENS,
    MANY_REQUESTS,
    MIN_TOKENS,
    SINGLE_REQUEST_FACTOR,
    WAITING_STEPS,
)
from quintet.core.throughput import Throughput
from quintet.wire import codec
from quintet.wire.step import StepPlan

from .fake import World
from .fake_model import expected

MS = 1_000_000
LONG = [3 + i * i % 190 for i in range(1500)]


def paced(ns_per_token: int, **options: object) -> World:
    """Make a world with an executor that takes ``ns_per_token`` for each token of a step."""
    settings: dict[str, object] = {"max_num_batched_tokens": 2048, "max_model_len": 2048, "num_blocks": 1000}
    world = World(block_size=16, max_steps_in_flight=1, **(settings | {"step_target_ms": 100} | options))
    take_results(world, ns_per_token)
    return world


def take_results(world: World, ns_per_token: int) -> None:
    execute = world.executor.execute

    def timed(plan: StepPlan) -> None:
        execute(plan)
        world.executor.results[-1].compute_ns = ns_per_token * sum(codec.unpack_i32(plan.counts))

    world.executor.execute = timed  # type: ignore[method-assign]


def counts(world: World) -> list[int]:
    plan = world.plan()
    assert plan is not None
    world.commit()
    return list(codec.unpack_i32(plan.counts))


def admit(world: World, *request_ids: int, num_prompt: int = 1000, max_tokens: int = 30) -> None:
    for request_id in request_ids:
        prompt = [100 + request_id, *LONG[: num_prompt - 1]]
        world.admit(request_id, prompt, max_tokens=max_tokens, ignore_eos=True)


def test_chunks_follow_measured_throughput() -> None:
    world = paced(MS // 2)
    admit(world, 1, 2, 3)
    assert counts(world) == [FIRST_TOKENS]  # nothing is measured yet
    assert [counts(world) for _ in range(4)] == [[200]] * 4  # 100 ms at half a millisecond a token
    assert counts(world) == [72, 128]  # the first prompt finishes before the next starts
    assert counts(world) == [1, 199]


def test_steps_are_shorter_with_few_waiting_tokens() -> None:
    world = paced(MS // 2)
    admit(world, 1, num_prompt=FIRST_TOKENS, max_tokens=200)
    assert counts(world) == [FIRST_TOKENS]
    admit(world, 2, num_prompt=1000)
    assert counts(world) == [1, 132]  # two thirds of 200, although an eighth of the waiting tokens is less
    admit(world, 3, num_prompt=600)
    assert counts(world) == [1, (1 + 868 + 600) // WAITING_STEPS - 1]
    admit(world, 4, num_prompt=1000)
    assert counts(world) == [1, 199]


def test_steps_are_not_shorter_with_many_streams() -> None:
    world = paced(MS // 2, slots=MANY_REQUESTS + 1)
    admit(world, *range(1, MANY_REQUESTS + 1), num_prompt=FIRST_TOKENS // MANY_REQUESTS, max_tokens=200)
    while counts(world) != [1] * MANY_REQUESTS:
        pass
    admit(world, MANY_REQUESTS + 1, num_prompt=1000)
    assert counts(world) == [1] * MANY_REQUESTS + [
        200 - MANY_REQUESTS
    ]  # with fewer streams: two thirds of 200


def test_lone_request_takes_longer_steps() -> None:
    world = paced(MS // 2)
    admit(world, 1, num_prompt=900)
    assert counts(world) == [SINGLE_REQUEST_FACTOR * FIRST_TOKENS]
    assert counts(world) == [900 - SINGLE_REQUEST_FACTOR * FIRST_TOKENS]


def test_prefill_progresses_with_slow_steps() -> None:
    world = paced(1000 * MS)
    admit(world, 1, 2)
    counts(world)
    assert counts(world) == [1 + MIN_TOKENS]
    world.run()
    for request_id in (1, 2):
        prompt = [100 + request_id, *LONG[:999]]
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, 30, stops=())


def test_decodes_are_always_scheduled() -> None:
    world = paced(10 * MS, slots=64)
    admit(world, *range(1, 61), num_prompt=2)
    for _ in range(5):
        counts(world)
    admit(world, 61)
    assert counts(world) == [1] * 60 + [MIN_TOKENS]


def test_a_fast_executor_is_bounded_by_the_budget_alone() -> None:
    world = paced(1)
    admit(world, 1, 2, 3)
    counts(world)
    assert counts(world) == [1000 - FIRST_TOKENS, 1000, 2048 - 2000 + FIRST_TOKENS]


def test_without_target_throughput_changes_no_plan() -> None:
    worlds = [paced(ns_per_token, step_target_ms=0) for ns_per_token in (1, 50 * MS)]
    for world in worlds:
        admit(world, 1, 2, 3)
        world.run()
    assert worlds[0].plans == worlds[1].plans


def test_whole_prompts_are_not_cut() -> None:
    world = paced(50 * MS, enable_chunked_prefill=False)
    admit(world, 1, 2)
    assert counts(world) == [1000, 1000]


def test_throughput_forgets_an_outlier() -> None:
    pace = Throughput()
    for _ in range(20):
        pace.note_computing(100, 100 * MS)
    pace.note_computing(100, 2000 * MS)
    slowed = pace.tokens_in(100 * MS)
    assert slowed is not None and slowed < 40
    for _ in range(40):
        pace.note_computing(100, 100 * MS)
    assert pace.tokens_in(100 * MS) in {98, 99, 100}


def test_small_steps_are_not_measured() -> None:
    pace = Throughput()
    pace.note_computing(8, 30 * MS)
    assert pace.tokens_in(100 * MS) is None
