"""Batch scheduling: longest outputs start first; prefill fills steps that are needed anyway."""

from __future__ import annotations

from quintet.core.features.prefill_pacing import MIN_TOKENS
from quintet.wire import codec

from .fake import World
from .fake_model import expected

PROMPT = [3 + i * i % 190 for i in range(1500)]


def batch(
    shapes: list[tuple[int, int]], policy: str = "longest", slots: int = 64, **options: object
) -> World:
    """Make a world with requests of these ``(prompt, outputs)`` lengths, numbered from 1."""
    settings: dict[str, object] = {"max_num_batched_tokens": 4096, "max_model_len": 2048, "num_blocks": 2000}
    world = World(block_size=16, slots=slots, policy=policy, max_steps_in_flight=1, **(settings | options))
    for request_id, (num_prompt, max_tokens) in enumerate(shapes, 1):
        world.admit(request_id, prompt_of(request_id, num_prompt), max_tokens=max_tokens, ignore_eos=True)
    return world


def prompt_of(request_id: int, num_prompt: int) -> list[int]:
    return [100 + request_id, *PROMPT[: num_prompt - 1]]


def next_counts(world: World) -> list[int]:
    plan = world.plan()
    assert plan is not None
    world.commit()
    return list(codec.unpack_i32(plan.counts))


def num_steps(shapes: list[tuple[int, int]], policy: str) -> int:
    world = batch(shapes, policy)
    world.run()
    for request_id, (num_prompt, max_tokens) in enumerate(shapes, 1):
        prompt = prompt_of(request_id, num_prompt)
        assert world.outcomes[request_id].tokens == expected(prompt, request_id, max_tokens, stops=())
    return len(world.plans)


def test_longest_outputs_first_then_arrival_order() -> None:
    world = batch([(3, 5), (3, 9), (3, 5), (3, 30)], slots=1)
    state = world.engine.state
    assert state is not None
    assert [request.request_id for request in state.waiting] == [4, 2, 1, 3]


def test_prompt_with_slack_is_chunked() -> None:
    world = batch([(10, 101), (1000, 21)])
    assert next_counts(world) == [10, MIN_TOKENS - 10]  # 1,010 tokens in 80 steps would be fewer
    assert next_counts(world) == [1, MIN_TOKENS]


def test_step_keeps_every_prompt_within_its_slack() -> None:
    world = batch([(10, 101), (1000, 91), (1000, 1)])
    assert next_counts(world) == [10, 82]  # the first two's 1,010 tokens in 11 steps: more than 2,010 in 101
    assert next_counts(world) == [1, 92]  # 918 in 10
    for _ in range(9):
        counts = next_counts(world)
    assert counts == [1, 91]  # the second request samples its first token at its latest step
    assert next_counts(world) == [1, 1, MIN_TOKENS]


def test_without_slack_prefill_is_as_fast_as_fcfs() -> None:
    shapes = [(50 * i, 20) for i in range(1, 12)]
    worlds = [batch(shapes, policy) for policy in ("longest", "fcfs")]
    for world in worlds:
        world.run()
    assert worlds[0].plans == worlds[1].plans


def test_a_batch_takes_few_steps_more_than_its_longest_request() -> None:
    shapes = [(64 + 37 * i % 448, 32 + 29 * i % 96) for i in range(32)]
    longest = max(max_tokens for _, max_tokens in shapes)
    assert longest <= num_steps(shapes, "longest") <= longest + 4


def test_early_stop_advances_other_prompts() -> None:
    world = batch([(10, 1001), (1000, 21), (1000, 21)])
    next_counts(world)
    assert next_counts(world) == [1, MIN_TOKENS]
    world.cancel(1)
    assert sum(next_counts(world)) == 2000 - (MIN_TOKENS - 10) - MIN_TOKENS


def test_whole_prompts_are_not_cut() -> None:
    world = batch([(10, 101), (1000, 21)], enable_chunked_prefill=False)
    assert next_counts(world) == [10, 1000]


def test_requests_beyond_memory_are_ordered_last() -> None:
    world = batch([(60, 20), (60, 80), (60, 40)], num_blocks=10, slots=1)  # 160 tokens: 80, 140 and 100
    state = world.engine.state
    assert state is not None
    assert [request.request_id for request in state.waiting] == [1, 2, 3]
    world.run()
    world.admit(4, prompt_of(4, 60), max_tokens=20)
    world.admit(5, prompt_of(5, 40), max_tokens=40)
    assert [request.request_id for request in state.waiting] == [5, 4]


def test_prompts_are_not_delayed_when_memory_is_short() -> None:
    world = batch([(10, 101), (200, 21)], num_blocks=20)
    assert next_counts(world) == [10, 200]
