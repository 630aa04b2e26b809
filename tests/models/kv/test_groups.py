"""Layers with windows in groups of their own, end to end: transformers' tokens whatever becomes of a request's blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.models.conftest import in_groups
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.test_engine import House, changed, without_prefix_cache

from quintet.executor.worker import make_torch_worker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams
from quintet.wire.step import Capacity

NUM_TOKENS = 40
WINDOWED = {"mistral-window": {"sliding"}, "qwen2-window": {"full", "sliding"}}
"""By family, the kinds of its groups."""


def greedy(n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0, ignore_eos=True, n=n)


def with_blocks(config: EngineConfig, num_blocks: int) -> EngineConfig:
    cache = msgspec.structs.replace(config.cache, memory_bytes=num_blocks * config.model.kv.bytes_per_block)
    return msgspec.structs.replace(config, cache=cache)


def lose_executor(house: House) -> None:
    """Have the executor begin anew with empty tables; what it had in flight is lost."""
    house.worker.reset()
    house._pending.clear()
    limits = house.engine.state.limits if house.engine.state else None
    assert limits is not None
    house._apply(
        house.engine.capacity(
            Capacity(2, limits.num_blocks, limits.block_size, limits.num_slots, limits.max_model_len), 0
        )
    )


def run_evicting(house: House, seed: int) -> None:
    """Work until nobody is left, preempting somebody every few steps, with a device that forgets what nobody holds at once."""
    rng, state = random.Random(seed), house.engine.state
    assert state is not None
    while house.engine.num_live:
        while (plan := house.engine.plan(0)) is not None:
            house._begin([plan])
        house._apply(house.engine.commit(house._pending.popleft().result(), 0))
        if rng.random() < 0.2 and state.running:
            state.preempt(rng.choice(state.running))
        free, state.pool.free = state.pool.free, []
        evicted = [state.pool.take() for _ in list(state.pool.cached)]
        state.pool.free = free
        state.pool.release(evicted, state.fence)


@pytest.mark.parametrize("family", WINDOWED)
def test_what_went_to_the_host_comes_back(family: str, serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES[family](), max_model_len=160)
    config = changed(in_groups(served.config), max_num_batched_tokens=29)
    size = 200 * config.model.kv.bytes_per_block
    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, swap_bytes=size))
    prompts = prompts_of((1, 33, 60))
    worker = make_torch_worker(config)
    for variant in (config, without_prefix_cache(config)):
        house = House(variant, worker)
        for i, prompt in enumerate(prompts):
            house.admit(i + 1, prompt, greedy())
        run_evicting(house, 1)
        assert [house.outputs[i + 1] for i in range(3)] == served.greedy(prompts, NUM_TOKENS)
        assert house.engine.state is not None
        assert house.engine.state.counters.swap_in_blocks > 0


@pytest.mark.parametrize("family", WINDOWED)
def test_what_is_out_of_sight_is_let_go_of(family: str, serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES[family](), max_model_len=160)
    config = in_groups(served.config)
    kv = config.model.kv
    assert {group.kind for group in kv.groups} == WINDOWED[family]
    worker = make_torch_worker(config)
    prompts = prompts_of((1, 17, 33, 60, 90))
    expected = served.greedy(prompts, NUM_TOKENS)
    needed = kv.most_blocks(130, 13)
    variants = {
        "together": changed(config),
        "chunks": changed(config, max_num_batched_tokens=13, long_prefill_token_threshold=5),
        "hardly any blocks": with_blocks(changed(config, max_num_batched_tokens=13), needed + 1),
        "no prefix cache, few blocks": without_prefix_cache(
            with_blocks(changed(config, max_num_batched_tokens=13), needed + 3)
        ),
    }
    for name, variant in variants.items():
        house = House(variant, worker)
        for round_ in (0, 100):
            for i, prompt in enumerate(prompts):
                house.admit(round_ + i + 1, prompt, greedy())
            house.run()
            outputs = [house.outputs[round_ + i + 1] for i in range(len(prompts))]
            assert outputs == expected, (name, round_)
        assert (sum(house.cached.values()) > 0) or "blocks" in name, name


@pytest.mark.parametrize("family", WINDOWED)
def test_choices_and_a_lost_executor(family: str, serve: Callable[..., Any]) -> None:
    """Further choices copy the block that they write into in every group; after a loss all is computed anew."""
    served = serve(FAMILIES[family](), max_model_len=160)
    config = changed(in_groups(served.config), max_num_batched_tokens=29)
    house = House(config, make_torch_worker(config))
    prompts = prompts_of((39, 70))
    expected = served.greedy(prompts, NUM_TOKENS)
    for i, prompt in enumerate(prompts):
        house.admit(10 * i + 1, prompt, greedy(n=3))
    for _ in range(12):
        while (plan := house.engine.plan(0)) is not None:
            house._begin([plan])
        house._apply(house.engine.commit(house._pending.popleft().result(), 0))
    lose_executor(house)
    house.run()
    for i, outputs in enumerate(expected):
        assert [house.outputs[10 * i + 1 + choice] for choice in range(3)] == [outputs] * 3
