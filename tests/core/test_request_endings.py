"""Endings of requests: one per request, with the right reason and all resources freed."""

from __future__ import annotations

import pytest

from quintet.core.policy import fcfs
from quintet.core.requests.admission import make_requests
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import MAX_ENDED
from quintet.wire import codec
from quintet.wire.ids import RequestIds
from quintet.wire.messages import Admit, FinishReason
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec

from .fake import World
from .fake_model import EOS, expected

PROMPT = list(range(10, 21))


def seed_with(token: int, index: int) -> int:
    """Return a seed that samples ``token`` for `PROMPT` first at ``index``."""
    for seed in range(1, 100_000):
        outputs = expected(PROMPT, seed, index + 1, stops=())
        if outputs.count(token) == 1 and outputs[-1] == token:
            return seed
    raise AssertionError("no such seed")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_max_tokens(depth: int) -> None:
    world = World(max_steps_in_flight=depth)
    world.admit(5, PROMPT, max_tokens=6, ignore_eos=True)
    world.run()
    outcome = world.outcomes[5]
    assert outcome.tokens == expected(PROMPT, 5, 6, stops=())
    assert (outcome.finish, outcome.stop_id) == (FinishReason.LENGTH, None)
    world.assert_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_planned_beyond_max_tokens(depth: int) -> None:
    world = World(max_steps_in_flight=depth)
    world.admit(5, PROMPT, max_tokens=6, ignore_eos=True)
    world.run()
    assert len(world.plans) == 6


def test_model_length_ends_a_request_without_max_tokens() -> None:
    world = World(max_model_len=20)
    world.admit(5, PROMPT, max_tokens=None, ignore_eos=True)
    world.run()
    assert len(world.outcomes[5].tokens) == 20 - len(PROMPT)
    assert world.outcomes[5].finish is FinishReason.LENGTH


def test_kv_memory_ends_a_request_that_fills_it_alone() -> None:
    world = World(num_blocks=4, block_size=4)
    world.admit(5, PROMPT, max_tokens=None, ignore_eos=True)
    world.run()
    assert len(world.outcomes[5].tokens) == 16 - len(PROMPT)
    assert world.outcomes[5].finish is FinishReason.LENGTH
    world.assert_idle()


def test_end_of_sequence() -> None:
    world = World()
    world.admit(1, PROMPT, seed=seed_with(EOS, 3), max_tokens=10)
    world.run()
    outcome = world.outcomes[1]
    assert len(outcome.tokens) == 4 and outcome.tokens[-1] == EOS
    assert (outcome.finish, outcome.stop_id) == (FinishReason.STOP, None)


def test_stop_token_is_reported() -> None:
    world = World()
    world.admit(1, PROMPT, seed=seed_with(77, 3), max_tokens=10, ignore_eos=True, stop_token_ids=[77, EOS])
    world.run()
    outcome = world.outcomes[1]
    assert (outcome.finish, outcome.stop_id, len(outcome.tokens)) == (FinishReason.STOP, 77, 4)


def test_min_tokens_continues_after_early_eos() -> None:
    world = World()
    world.admit(1, PROMPT, seed=seed_with(EOS, 3), max_tokens=6, min_tokens=4)
    world.run()
    assert len(world.outcomes[1].tokens) > 4


def test_stop_tokens_reach_the_device_in_order() -> None:
    world = World()
    world.admit(1, PROMPT, stop_token_ids=[9, 8])
    plan = world.plan()
    assert plan is not None and plan.new_rows[0].stop_ids == [EOS, 9, 8]
    world.admit(2, PROMPT, stop_token_ids=[9, 8], ignore_eos=True)
    plan = world.plan()
    assert plan is not None and plan.new_rows[0].stop_ids == [9, 8]


def test_cancel_running_waiting_and_unknown() -> None:
    world = World(slots=1)
    world.admit(1, PROMPT, max_tokens=20, ignore_eos=True)
    world.admit(2, PROMPT, max_tokens=20)
    world.step()
    world.cancel(1, 2, 99)
    assert {r: (o.finish, o.num_endings) for r, o in world.outcomes.items()} == {
        1: (FinishReason.ABORT, 1),
        2: (FinishReason.ABORT, 1),
    }
    assert world.unknown == [99]
    world.run()
    world.assert_idle()


@pytest.mark.parametrize("keep", [False, True])
def test_every_cancel_is_answered_once(keep: bool) -> None:
    """A finished request is answered by its ending, which may be in flight."""
    world = World(start=False)
    world.apply(world.engine.cancel([7], world.tick(), keep=keep))
    assert world.unknown == []
    world.new_executor()
    assert world.unknown == [7]
    world.admit(1, PROMPT, max_tokens=2, ignore_eos=True)
    world.run()
    for request_id in (1, 8, 1):
        world.apply(world.engine.cancel([request_id], world.tick(), keep=keep))
    assert world.unknown == [7, 8] and world.outcomes[1].num_endings == 1


def test_stop_hit_ends_silently() -> None:
    world = World()
    world.admit(1, PROMPT, max_tokens=20, ignore_eos=True)
    world.step()
    world.engine.stop_hit([1, 99], [0, 0], world.tick())
    world.run()
    assert world.outcomes[1].num_endings == 0
    world.assert_idle()


def test_live_id_is_not_admitted_again() -> None:
    world = World()
    world.admit(1, PROMPT, max_tokens=5, ignore_eos=True)
    world.step()
    world.admit(1, PROMPT, max_tokens=5, ignore_eos=True)
    world.run()
    assert world.outcomes[1].num_endings == 1 and world.engine.state is not None
    assert world.engine.state.counters.generation_tokens == 5


def test_ended_id_is_not_admitted_again() -> None:
    """A new tokenizer resends requests; the first copy may have ended before."""
    world = World()
    world.admit(1, PROMPT, max_tokens=5, ignore_eos=True)
    world.admit(4, PROMPT, n=2, max_tokens=5, ignore_eos=True)
    world.run()
    world.admit(6, PROMPT, output_ids=[5] * 8)  # ended before
    world.new_executor()
    for request_id, choices in ((1, 1), (4, 2), (6, 1)):
        outputs = [5] * 8 if request_id == 6 else []
        world.admit(request_id, PROMPT, n=choices, max_tokens=5, ignore_eos=True, output_ids=outputs)
    assert world.engine.num_live == 0
    assert all(world.outcomes[request_id].num_endings == 1 for request_id in (1, 4, 5, 6))


def test_number_of_remembered_endings_is_bounded() -> None:
    world = World(slots=1)
    world.admit(1, PROMPT, max_tokens=1)
    world.run()
    assert world.engine.state is not None
    (request,) = make_requests(
        Admit(10, codec.pack_i32(PROMPT), RequestSpec(SamplingParams(), 0, 0), 0),
        0,
        fcfs,
        [],
        world.engine.state.limits,
        0,
    )
    for request.request_id in range(10, 10 + MAX_ENDED):
        world.engine.state.note_ended(request)
    assert len(world.engine.state.ended) == MAX_ENDED
    world.admit(1, PROMPT)
    assert world.engine.num_live == 1


def test_resumed_outputs_are_not_recomputed() -> None:
    world = World()
    whole = expected(PROMPT, 1, 8, stops=())
    world.admit(1, PROMPT, output_ids=whole[:5], ignore_eos=True)
    world.run()
    assert world.outcomes[1].tokens == whole and world.engine.state is not None
    assert world.engine.state.counters.generation_tokens == 3


@pytest.mark.parametrize(
    ("outputs", "finish"), [([5, EOS], FinishReason.STOP), ([5] * 8, FinishReason.LENGTH)]
)
def test_finished_resumed_request_ends_at_once(outputs: list[int], finish: FinishReason) -> None:
    world = World()
    world.admit(1, PROMPT, output_ids=outputs)
    assert world.outcomes[1].finish is finish
    world.assert_idle()


def test_requests_of_lost_frontend_end() -> None:
    world = World()
    old, new, other = RequestIds(1, 8191).take(), RequestIds(1, 8192).take(), RequestIds(2, 1).take()
    for request_id in (old, new, other):
        world.admit(request_id, PROMPT)
    world.engine.abandon(1, 8191, world.tick(), down=False)
    world.engine.abandon(2, 0, world.tick(), down=True)
    assert world.engine.num_live == 3
    world.engine.abandon(1, 8192, world.tick(), down=False)
    assert world.engine.state is not None and list(world.engine.state.live) == [new, other]
    world.engine.abandon(2, 1, world.tick(), down=True)
    assert list(world.engine.state.live) == [new]
    world.admit(other, PROMPT)  # was in flight
    assert list(world.engine.state.live) == [new]
    world.run()
    world.assert_idle()


def test_new_executor_neither_loses_nor_repeats_tokens() -> None:
    world = World(max_steps_in_flight=3)
    for request_id in range(1, 6):
        world.admit(request_id, PROMPT, ignore_eos=True)
    for _ in range(3):
        world.step()
    world.new_executor()
    world.run()
    for request_id in range(1, 6):
        assert world.outcomes[request_id].tokens == expected(PROMPT, request_id, 8, stops=())
    world.assert_idle()


def test_repeated_capacity_changes_nothing() -> None:
    world = World(max_steps_in_flight=1)
    world.admit(1, PROMPT, ignore_eos=True)
    world.step()
    assert world.engine.capacity(world.executor.capacity, world.tick()).tokens == []
    world.run()
    assert len(world.plans) == 8


def test_new_executor_with_other_blocks_finds_no_wrong_prefix() -> None:
    world = World(max_steps_in_flight=1)
    for request_id in (1, 2, 3):
        world.admit(request_id, PROMPT, ignore_eos=True)
    world.step()
    world.new_executor(num_blocks=128, block_size=2)
    world.run()
    for request_id in (1, 2, 3):
        assert world.outcomes[request_id].tokens == expected(PROMPT, request_id, 8, stops=())
    world.admit(4, PROMPT)
    world.run()
    assert world.outcomes[4].num_cached == 10


def test_result_of_a_discarded_plan_is_ignored() -> None:
    world = World(max_steps_in_flight=2)
    world.admit(1, PROMPT, ignore_eos=True)
    world.plan()
    late = world.executor.results.popleft()
    world.new_executor()
    assert world.engine.commit(late, world.tick()).tokens == []
    world.run()
    assert world.outcomes[1].tokens == expected(PROMPT, 1, 8, stops=())


def test_smaller_executor_ends_requests_beyond_its_memory() -> None:
    world = World()
    world.admit(1, PROMPT, ignore_eos=True)
    world.admit(2, PROMPT[:5], ignore_eos=True)
    world.step()
    world.new_executor(num_blocks=2)
    assert world.outcomes[1].finish is FinishReason.ERROR
    world.run()
    assert world.outcomes[2].tokens == expected(PROMPT[:5], 2, 3, stops=())
    world.assert_idle()


def test_requests_before_the_capacity_wait_and_can_be_cancelled() -> None:
    world = World(start=False)
    world.admit(1, PROMPT, ignore_eos=True)
    world.admit(2, PROMPT)
    world.cancel(2)
    assert world.plan() is None and world.engine.num_live == 2
    world.new_executor()
    world.run()
    assert world.outcomes[1].tokens == expected(PROMPT, 1, 8, stops=())
    assert world.outcomes[2].finish is FinishReason.ABORT


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "at least 1"),
        (PROMPT * 30, {}, "maximum context length is 256"),
        (PROMPT * 4, {"num_blocks": 10}, "--kv-cache-memory"),
        (PROMPT, {"enable_chunked_prefill": False, "max_num_batched_tokens": 10}, "--max-num-batched-tokens"),
    ],
)
def test_rejections_say_how_to_fix_the_request(
    prompt: list[int], options: dict[str, object], words: str
) -> None:
    world = World(**options)  # type: ignore[arg-type]
    world.admit(1, prompt)
    assert words in world.failed[1] and world.engine.num_live == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 3])
def test_row_failed_by_executor_ends_alone(depth: int, at: int) -> None:
    """The executor reports it with the last sampled token; other requests and choices continue."""
    world = World(max_steps_in_flight=depth)
    world.admit(5, PROMPT, max_tokens=8, ignore_eos=True, n=2, seed=3)
    world.admit(9, PROMPT[:4], max_tokens=8, ignore_eos=True)
    while world.plan() is not None or world.executor.results:
        for result in world.executor.results:
            result.failed = codec.pack_i32(
                [row for row, request in enumerate(rows_of(world, result.step)) if fails(request, at)]
            )
        world.commit()
    assert world.outcomes[5].finish is FinishReason.ERROR
    assert len(world.outcomes[5].tokens) == at + 1
    assert [world.outcomes[other].finish for other in (6, 9)] == [FinishReason.LENGTH] * 2
    world.assert_idle()


def rows_of(world: World, step: int) -> list[Request]:
    """Return the requests of a step in flight."""
    assert world.engine.state is not None
    return next((flight.rows for flight in world.engine.state.in_flight if flight.step == step), [])


def fails(request: Request, at: int) -> bool:
    return request.request_id == 5 and request.num_outputs >= at
