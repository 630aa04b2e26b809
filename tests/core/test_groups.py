"""Layers that need different things, in groups of their own: windows, chunks and states, audited as in every trace."""

from __future__ import annotations

import random

import pytest

from quintet.core import states
from quintet.wire.kv_spec import KvGroup

from .fake import World, expected
from .trace import assert_served, random_trace

SLIDING = [KvGroup("sliding", [0], 8)]
MIXED = [KvGroup("sliding", [0, 1], 8), KvGroup("full", [2])]
HYBRID = [KvGroup("full", [0]), KvGroup("state", [1, 2])]
PROMPT = list(range(10, 50))  # 10 blocks of 4


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(60))
def test_random_trace_in_groups(seed: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "KEEP_EVERY", 1 + seed % 9)
    assert_served(*random_trace(seed, 250, depth, in_groups=True))


@pytest.mark.parametrize("num_host_blocks", [5, 100])
@pytest.mark.parametrize("seed", range(30))
def test_random_trace_in_groups_with_host_memory(
    seed: int, num_host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "KEEP_EVERY", 1 + seed % 9)
    poisonous = 0.05 if seed % 3 == 0 else 0.0
    assert_served(*random_trace(seed, 250, 1 + seed % 3, poisonous, num_host_blocks, in_groups=True))


def blocks_held(world: World) -> int:
    """How many blocks requests hold, or have let go of behind a fence."""
    assert world.engine.state is not None
    return world.engine.state.pool.num_used


def test_a_window_holds_no_more_than_it_sees() -> None:
    """A request of 240 tokens lives in blocks for a window and a step."""
    world = World(groups=SLIDING, num_blocks=8, depth=1, max_num_batched_tokens=8)
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
def test_a_beginning_is_found_again(groups: list[KvGroup]) -> None:
    world = World(groups=groups, num_blocks=100)
    world.admit(1, PROMPT, max_tokens=4, ignore_eos=True)
    world.run()
    world.admit(2, [*PROMPT, 60, 61], max_tokens=4, ignore_eos=True)
    world.run()
    # A hybrid has a state where one was kept: behind the last full block that leaves a token to compute.
    assert world.outcomes[2].num_cached == (36 if groups is HYBRID else 40)
    assert world.outcomes[2].tokens == expected([*PROMPT, 60, 61], 2, 4, stops=())


def test_a_hit_needs_the_window_alone() -> None:
    """Blocks behind the window may be gone: what the next token sees is enough."""
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


def test_what_a_state_needs_is_kept_every_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "KEEP_EVERY", 16)
    world = World(groups=HYBRID, num_blocks=100, max_num_batched_tokens=64)
    world.admit(1, PROMPT, max_tokens=1)
    world.run()
    world.admit(2, [*PROMPT[:35], 99, 98], max_tokens=2, ignore_eos=True)
    world.run()
    assert world.outcomes[2].num_cached == 32
    assert world.outcomes[2].tokens == expected([*PROMPT[:35], 99, 98], 2, 2, stops=())


@pytest.mark.parametrize("groups", [SLIDING, MIXED, HYBRID], ids=["sliding", "mixed", "hybrid"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_begin_behind_the_prompt(groups: list[KvGroup], prefix_caching: bool) -> None:
    world = World(groups=groups, num_blocks=100, depth=1, prefix_caching=prefix_caching)
    world.admit(1, PROMPT[:39], n=3, max_tokens=6, ignore_eos=True)
    world.run()
    state = world.engine.state
    assert state is not None
    computed = sorted(ending.num_computed for ending in state.endings)
    assert computed == [1, 1, 39]
    world.assert_idle()


@pytest.mark.parametrize("seed", [5, 10, 15, 42, 60])
def test_choices_share_no_state_that_is_written_over(seed: int) -> None:
    """The elder loses its blocks while choices wait, and its state, evicted too, comes back from the host."""
    rng = random.Random(seed)
    n, prompt = rng.choice([2, 3]), list(range(10, 10 + rng.choice([9, 13, 17, 21, 25])))
    world = World(
        groups=HYBRID,
        num_blocks=rng.choice([12, 16, 20, 26]),
        num_host_blocks=100,
        depth=rng.choice([1, 2]),
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


def test_a_long_request_is_refused_by_what_its_groups_hold() -> None:
    world = World(groups=MIXED, num_blocks=12, max_num_batched_tokens=8)
    world.admit(1, list(range(3, 60)), max_tokens=2)
    assert "needs" in world.failed[1] and "the server has 12" in world.failed[1]
