"""Groups of layers with different KV needs (windows, chunks, states), audited after every change."""

from __future__ import annotations

import random

import pytest

from quintet.core import recurrent_state
from quintet.wire.kv_spec import KvGroup
from tests.core.fake import World
from tests.core.fake_model import expected
from tests.core.trace import assert_served, random_trace

SLIDING = [KvGroup("sliding", [0], 8)]
MIXED = [KvGroup("sliding", [0, 1], 8), KvGroup("full", [2])]
HYBRID = [KvGroup("full", [0]), KvGroup("state", [1, 2])]
STATES = [KvGroup("state", [0, 1]), KvGroup("state", [2])]
PROMPT = list(range(10, 50))  # 10 blocks of 4


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_random_trace_in_groups(seed: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 1 + seed % 9)
    monkeypatch.setattr(recurrent_state, "GRAIN", 1 + seed % 5)
    assert_served(*random_trace(seed, 250, depth, in_groups=True))


@pytest.mark.parametrize("num_host_blocks", [5, 100])
@pytest.mark.parametrize("seed", range(30))
def test_random_trace_in_groups_with_host_memory(
    seed: int, num_host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 1 + seed % 9)
    monkeypatch.setattr(recurrent_state, "GRAIN", 1 + seed % 5)
    poisonous = 0.05 if seed % 3 == 0 else 0.0
    assert_served(*random_trace(seed, 250, 1 + seed % 3, poisonous, num_host_blocks, in_groups=True))


def blocks_held(world: World) -> int:
    """Return how many blocks requests hold, or have released behind a fence."""
    assert world.engine.state is not None
    return world.engine.state.pool.num_used


def test_a_window_holds_no_more_than_it_sees() -> None:
    """A request of 240 tokens holds the blocks of one window and one step."""
    world = World(groups=SLIDING, num_blocks=8, max_steps_in_flight=1, max_num_batched_tokens=8)
    world.admit(1, PROMPT, max_tokens=200, ignore_eos=True)
    most = 0
    while world.engine.num_live:
        world.step()
        most = max(most, blocks_held(world))
    assert world.outcomes[1].tokens == expected(PROMPT, 1, 200, stops=())
    assert most <= 5  # (8 + 8 - 3) // 4 + 2
    world.assert_idle()


def test_a_prompt_longer_than_the_pool_is_served() -> None:
    world = World(groups=SLIDING, num_blocks=6, max_num_batched_tokens=8)
    for request_id in (1, 2, 3):
        world.admit(request_id, PROMPT, max_tokens=20, ignore_eos=True)
    world.run()
    for request_id in (1, 2, 3):
        assert world.outcomes[request_id].tokens == expected(PROMPT, request_id, 20, stops=())
    world.assert_idle()


@pytest.mark.parametrize("groups", [SLIDING, MIXED, HYBRID], ids=["sliding", "mixed", "hybrid"])
def test_prefix_is_reused(groups: list[KvGroup]) -> None:
    world = World(groups=groups, num_blocks=100)
    world.admit(1, PROMPT, max_tokens=4, ignore_eos=True)
    world.run()
    world.admit(2, [*PROMPT, 60, 61], max_tokens=4, ignore_eos=True)
    world.run()
    # A hybrid has a recurrent state where one was kept: after the last full block that leaves a token to compute.
    assert world.outcomes[2].num_cached == (36 if groups is HYBRID else 40)
    assert world.outcomes[2].tokens == expected([*PROMPT, 60, 61], 2, 4, stops=())


def test_cache_hit_needs_only_the_window() -> None:
    """Blocks before the window may be evicted: the next token does not see them."""
    world = World(groups=SLIDING, num_blocks=100)
    world.admit(1, PROMPT, max_tokens=1)
    world.run()
    assert world.engine.state is not None
    pool = world.engine.state.pool
    for block in list(pool.cached)[:-2]:
        del pool.cached[block]
        pool.index.forget(block)
        pool.free.append(block)
    world.admit(2, [*PROMPT, 60], max_tokens=2, ignore_eos=True)
    world.run()
    assert world.outcomes[2].num_cached == 40
    assert world.outcomes[2].tokens == expected([*PROMPT, 60], 2, 2, stops=())


def test_states_are_checkpointed_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_state, "CHECKPOINT_EVERY", 16)
    world = World(groups=HYBRID, num_blocks=100, max_num_batched_tokens=64)
    world.admit(1, PROMPT, max_tokens=1)
    world.run()
    world.admit(2, [*PROMPT[:35], 99, 98], max_tokens=2, ignore_eos=True)
    world.run()
    assert world.outcomes[2].num_cached == 32
    assert world.outcomes[2].tokens == expected([*PROMPT[:35], 99, 98], 2, 2, stops=())


def chat(world: World, *, keeps_answers: bool = True, stops: bool = False) -> list[int]:
    """Play a chat of five turns; return how many tokens were computed of each turn but the first.

    Each turn sends the history and 40 tokens more. Its answer has 50 tokens, or ends at a stop token. At least the
    last 20 tokens of an answer stay in the history.
    """
    assert world.engine.state is not None
    history, rng = list[int](), random.Random(0)
    for turn in range(5):
        history += [rng.randrange(3, 200) for _ in range(40)]
        answer = expected(history, turn, 50, stops=())
        stop_token_ids = [answer[-1]] if stops else []
        world.admit(
            turn,
            history,
            max_tokens=50 + stops,
            ignore_eos=True,
            stop_token_ids=stop_token_ids,
            min_tokens=49,
        )
        world.run()
        assert world.outcomes[turn].tokens == answer
        history = history + (answer if keeps_answers else answer[30:])
    world.assert_idle()
    return [ending.stats.num_computed for ending in world.engine.state.endings[1:]]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "groups", [HYBRID, [*HYBRID, *SLIDING], STATES], ids=["full", "sliding too", "states"]
)
def test_next_chat_turn_computes_only_new_tokens(groups: list[KvGroup], depth: int) -> None:
    """Each turn computes its new tokens and the previous answer's last token, for any block size."""
    world = World(groups=groups, num_blocks=60, block_size=64, max_steps_in_flight=depth, max_model_len=1000)
    assert chat(world) == [41] * 4


@pytest.mark.parametrize("depth", [1, 2])
def test_next_chat_turn_after_a_stop_token(depth: int) -> None:
    """With two steps in flight, the token that ended the answer is computed, too."""
    world = World(groups=HYBRID, num_blocks=60, block_size=64, max_steps_in_flight=depth, max_model_len=1000)
    assert chat(world, stops=True) == [42 - depth] * 4


def test_next_chat_turn_without_reasoning_reuses_the_prompt() -> None:
    """At most 16 tokens of the previous prompt are recomputed, plus the rest of its answer."""
    world = World(groups=HYBRID, num_blocks=60, block_size=64, max_model_len=1000)
    for num_computed in chat(world, keeps_answers=False):
        assert 40 + 20 < num_computed <= 40 + 20 + recurrent_state.GRAIN


def test_end_state_is_evicted_when_blocks_are_scarce() -> None:
    """With few blocks, a chat's next turn evicts the end state of the previous turn."""
    for num_blocks in range(5, 12):
        world = World(groups=HYBRID, num_blocks=num_blocks, block_size=16, max_model_len=1000)
        world.admit(1, PROMPT[:30], max_tokens=8, ignore_eos=True)
        world.run()
        world.admit(2, [*PROMPT[:30], *world.outcomes[1].tokens, 9], max_tokens=7, ignore_eos=True)
        world.run()
        assert (world.outcomes[2].num_cached or 0) >= (37 if num_blocks > 8 else 0)
        world.assert_idle()


def test_chats_share_a_prefix_shorter_than_a_block() -> None:
    world = World(groups=HYBRID, num_blocks=200, block_size=64, slots=4)
    stem = PROMPT[:20]
    for turn in (0, 1):
        for i in range(12):
            prompt = [*stem, *range(60, 60 + i % 5), 100 + i]
            if turn:
                prompt += [*world.outcomes[i].tokens, 7, 8]
            world.admit(100 * turn + i, prompt, max_tokens=6, ignore_eos=True)
        world.run()
    for i in range(12):
        assert world.outcomes[100 + i].num_cached == 21 + i % 5 + 5
    assert world.engine.state is not None
    index = world.engine.state.pool.index
    assert sum(sum(lengths.values()) for lengths in index.ends.values()) == len(index.end_of)


@pytest.mark.parametrize("groups", [SLIDING, MIXED, HYBRID], ids=["sliding", "mixed", "hybrid"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_start_after_the_prompt(groups: list[KvGroup], prefix_caching: bool) -> None:
    world = World(groups=groups, num_blocks=100, max_steps_in_flight=1, prefix_caching=prefix_caching)
    world.admit(1, PROMPT[:39], n=3, max_tokens=6, ignore_eos=True)
    world.run()
    state = world.engine.state
    assert state is not None
    computed = sorted(ending.stats.num_computed for ending in state.endings)
    assert computed == [1, 1, 39]
    world.assert_idle()


@pytest.mark.parametrize("cancelled", [[], [2], [2, 3]], ids=["all begin", "one ends", "all end"])
def test_prompt_state_is_released_when_no_choice_waits(cancelled: list[int]) -> None:
    """The first choice runs on; with states alone its prompt state is not matched again."""
    world = World(groups=STATES, num_blocks=100, slots=2, max_steps_in_flight=1, prefix_caching=False)
    world.admit(1, PROMPT[:9], n=3, max_tokens=50, ignore_eos=True)
    state = world.engine.state
    assert state is not None
    first_choice = state.live[1]
    while not first_choice.kv.fork_state_blocks:
        world.step()
    world.cancel(*cancelled)
    while (
        any(other.parent is first_choice for other in state.waiting) and first_choice.request_id in state.live
    ):
        world.step()
        if state.running[-1] is not first_choice:
            world.cancel(state.running[-1].request_id)
    assert first_choice.request_id in state.live and not first_choice.kv.fork_state_blocks
    world.run()
    world.assert_idle()


@pytest.mark.parametrize("seed", [5, 10, 15, 42, 60])
def test_choices_share_no_overwritten_state(seed: int) -> None:
    """The first choice is preempted while others wait; its evicted state is restored from the host."""
    rng = random.Random(seed)
    n, prompt = rng.choice([2, 3]), list(range(10, 10 + rng.choice([9, 13, 17, 21, 25])))
    world = World(
        groups=HYBRID,
        num_blocks=rng.choice([12, 16, 20, 26]),
        num_host_blocks=100,
        max_steps_in_flight=rng.choice([1, 2]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_num_seqs=rng.choice([1, 2, 3]),
    )
    world.admit(1, prompt, n=n, max_tokens=6, ignore_eos=True)
    world.admit(50, list(range(100, 100 + rng.choice([9, 20]))), max_tokens=20, ignore_eos=True)
    while world.engine.num_live:
        world.step()  # audits the core
        state = world.engine.state
        assert state is not None
        if rng.random() < 0.25 and state.running:
            state.preempt(rng.choice(state.running))
        if rng.random() < 0.25:
            free, state.pool.free = state.pool.free, []
            evicted = [state.pool.take() for _ in list(state.pool.cached)]
            state.pool.free = free
            state.pool.release(evicted, state.fence)
    assert world.outcomes[1].tokens == expected(prompt, 1, 6, stops=())
    world.assert_idle()


def test_length_limit_follows_groups() -> None:
    world = World(groups=MIXED, num_blocks=12, max_num_batched_tokens=8)
    world.admit(1, list(range(3, 60)), max_tokens=2)
    assert "the server's 12 KV blocks" in world.failed[1]
