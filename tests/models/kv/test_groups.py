"""Sliding-window layers in their own groups, end to end: transformers' tokens under every block operation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.models.conftest import in_groups
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.test_engine import CoreAndWorker, changed, without_prefix_cache

from quintet.executor.backends.registry import make_worker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams
from quintet.wire.step import Capacity

NUM_TOKENS = 40
WINDOWED = {"mistral-window": {"sliding"}, "qwen2-window": {"full", "sliding"}}
"""Kinds of groups by family."""


def greedy(n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0, ignore_eos=True, n=n)


def with_blocks(config: EngineConfig, num_blocks: int) -> EngineConfig:
    cache = msgspec.structs.replace(config.cache, memory_bytes=num_blocks * config.model.kv.bytes_per_block)
    return msgspec.structs.replace(config, cache=cache)


def lose_executor(driver: CoreAndWorker) -> None:
    """Restart the executor with empty tables; its steps in flight are lost."""
    driver.worker.reset()
    driver._pending.clear()
    limits = driver.engine.state.limits if driver.engine.state else None
    assert limits is not None
    driver._apply(
        driver.engine.capacity(
            Capacity(2, limits.num_blocks, limits.block_size, limits.num_slots, limits.max_model_len), 0
        )
    )


def run_evicting(driver: CoreAndWorker, seed: int) -> None:
    """Run until all requests are done, preempting one every few steps, with a device that drops unreferenced blocks
    immediately.
    """
    rng, state = random.Random(seed), driver.engine.state
    assert state is not None
    while driver.engine.num_live:
        while (plan := driver.engine.plan(0)) is not None:
            driver._begin([plan])
        driver._apply(driver.engine.commit(driver._pending.popleft().result(), 0))
        if rng.random() < 0.2 and state.running:
            state.preempt(rng.choice(state.running))
        free, state.pool.free = state.pool.free, []
        evicted = [state.pool.take() for _ in list(state.pool.cached)]
        state.pool.free = free
        state.pool.release(evicted, state.fence)


@pytest.mark.parametrize("family", WINDOWED)
def test_swapped_blocks_are_restored(family: str, serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES[family](), max_model_len=160)
    config = changed(in_groups(served.config), max_num_batched_tokens=29)
    size = 200 * config.model.kv.bytes_per_block
    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, swap_bytes=size))
    prompts = prompts_of((1, 33, 60))
    worker = make_worker(config)
    for variant in (config, without_prefix_cache(config)):
        driver = CoreAndWorker(variant, worker)
        for i, prompt in enumerate(prompts):
            driver.admit(i + 1, prompt, greedy())
        run_evicting(driver, 1)
        assert [driver.outputs[i + 1] for i in range(3)] == served.greedy(prompts, NUM_TOKENS)
        assert driver.engine.state is not None
        assert driver.engine.state.counters.swap_in_blocks > 0


@pytest.mark.parametrize("family", WINDOWED)
def test_blocks_before_the_window_are_freed(family: str, serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES[family](), max_model_len=160)
    config = in_groups(served.config)
    kv = config.model.kv
    assert {group.kind for group in kv.groups} == WINDOWED[family]
    worker = make_worker(config)
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
        driver = CoreAndWorker(variant, worker)
        for round_ in (0, 100):
            for i, prompt in enumerate(prompts):
                driver.admit(round_ + i + 1, prompt, greedy())
            driver.run()
            outputs = [driver.outputs[round_ + i + 1] for i in range(len(prompts))]
            assert outputs == expected, (name, round_)
        assert (sum(driver.cached.values()) > 0) or "blocks" in name, name


@pytest.mark.parametrize("family", WINDOWED)
def test_choices_and_a_lost_executor(family: str, serve: Callable[..., Any]) -> None:
    """Parallel samples copy the block that they write into in every group; after an executor loss all is recomputed."""
    served = serve(FAMILIES[family](), max_model_len=160)
    config = changed(in_groups(served.config), max_num_batched_tokens=29)
    driver = CoreAndWorker(config, make_worker(config))
    prompts = prompts_of((39, 70))
    expected = served.greedy(prompts, NUM_TOKENS)
    for i, prompt in enumerate(prompts):
        driver.admit(10 * i + 1, prompt, greedy(n=3))
    for _ in range(12):
        while (plan := driver.engine.plan(0)) is not None:
            driver._begin([plan])
        driver._apply(driver.engine.commit(driver._pending.popleft().result(), 0))
    lose_executor(driver)
    driver.run()
    for i, outputs in enumerate(expected):
        assert [driver.outputs[10 * i + 1 + choice] for choice in range(3)] == [outputs] * 3
