"""Several choices of one prompt: shared blocks, copy-on-write, separate sampling."""

from __future__ import annotations

import pytest

from quintet.wire import codec
from quintet.wire.messages import FinishReason
from quintet.wire.params import seed_of_choice

from .fake import World
from .fake_model import expected

PROMPT = list(range(10, 21))  # 11 tokens: two full blocks of 4 and a partly filled one


def check_choices(world: World, n: int, prompt: list[int] = PROMPT, max_tokens: int = 8) -> None:
    for choice in range(n):
        outputs = expected(prompt, seed_of_choice(100, choice), max_tokens, stops=())
        assert world.outcomes[100 + choice].tokens == outputs, choice


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_prompt", [1, 2, 4, 5, 8, 9, 11])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_have_their_own_tokens(depth: int, num_prompt: int, prefix_caching: bool) -> None:
    world = World(max_steps_in_flight=depth, prefix_caching=prefix_caching)
    world.admit(100, PROMPT[:num_prompt], n=4, ignore_eos=True)
    world.run()
    check_choices(world, 4, PROMPT[:num_prompt])
    world.assert_idle()


def test_prompt_is_computed_once() -> None:
    world = World(max_steps_in_flight=1, prefix_caching=False)
    world.admit(100, PROMPT, n=4, ignore_eos=True)
    first = world.plan()
    assert first is not None and list(codec.unpack_i32(first.counts)) == [11]
    world.commit()
    second = world.plan()
    assert second is not None and list(codec.unpack_i32(second.counts)) == [1, 1, 1, 1]
    assert len(codec.unpack_i32(second.copies)) == 2 * 3
    state = world.engine.state
    assert state is not None
    parent, *forks = state.running
    assert all(fork.kv.held[0].blocks[:2] == parent.kv.held[0].blocks[:2] for fork in forks)
    assert [state.pool.refs[block] for block in parent.kv.held[0].blocks] == [4, 4, 1]


def test_full_last_prompt_block_is_not_copied() -> None:
    world = World(max_steps_in_flight=1)
    world.admit(100, PROMPT[:9], n=3, ignore_eos=True)
    world.run()
    assert world.executor.num_copies == 0


def test_choices_wait_for_slots() -> None:
    world = World(slots=2)
    world.admit(100, PROMPT, n=5, ignore_eos=True)
    world.run()
    check_choices(world, 5)
    world.assert_idle()


def test_choices_survive_too_few_blocks() -> None:
    world = World(num_blocks=7, slots=8)
    world.admit(100, PROMPT, n=5, max_tokens=15, ignore_eos=True)
    world.run()
    check_choices(world, 5, max_tokens=15)
    world.assert_idle()


@pytest.mark.parametrize("steps_before", [0, 1, 4])
@pytest.mark.parametrize("cancelled", [0, 1])
def test_cancelling_one_choice_keeps_the_others(steps_before: int, cancelled: int) -> None:
    world = World()
    world.admit(100, PROMPT, n=3, ignore_eos=True)
    for _ in range(steps_before):
        world.step()
    world.cancel(100 + cancelled)
    world.run()
    assert world.outcomes[100 + cancelled].finish is FinishReason.ABORT
    for choice in {0, 1, 2} - {cancelled}:
        assert world.outcomes[100 + choice].tokens == expected(
            PROMPT, seed_of_choice(100, choice), 8, stops=()
        )
    world.assert_idle()


def test_every_choice_is_opened_with_the_same_prompt() -> None:
    world = World()
    world.admit(1, PROMPT, max_tokens=1)
    world.run()
    world.admit(100, PROMPT, n=3, ignore_eos=True)
    world.run()
    assert [world.outcomes[100 + choice].num_cached for choice in range(3)] == [8, 8, 8]


def test_first_choice_draws_first() -> None:
    """Its output brings the log-probabilities of the prompt. In stages, its last prompt token may wait for a later step."""
    world = World(stages=2, max_steps_in_flight=1, max_num_batched_tokens=11)
    for request_id in (1, 2):
        world.admit(request_id, [request_id, 5], max_tokens=40, ignore_eos=True)
    world.plan()
    world.commit()
    world.admit(100, PROMPT, n=3, ignore_eos=True, prompt_logprobs=0)
    drawn: list[int] = []
    while (plan := world.plan()) is not None:
        rows = [world.executor.slot_states[slot].row for slot in codec.unpack_i32(plan.slots)]
        drawn += [row.request_id for row, draws in zip(rows, plan.samples, strict=True) if draws]
        world.commit()
    assert [request_id for request_id in dict.fromkeys(drawn) if request_id >= 100] == [100, 101, 102]
    check_choices(world, 3)
