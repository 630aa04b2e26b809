"""The four scheduler hooks; absent hooks change no plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quintet.core.hooks import FEATURES, Feature, Hooks, Setup, build_features, flatten
from quintet.wire.config import (
    CacheConfig,
    KvDiskConfig,
    KvPeersConfig,
    KvStoreConfig,
    SchedulerConfig,
    SpeculativeConfig,
)

from .fake import World
from .fake_model import expected

PROMPT = list(range(10, 21))


def install(world: World, *features: Feature) -> None:
    state = world.engine.state
    assert state is not None
    added = flatten(features)
    state.hooks = Hooks(
        *(getattr(state.hooks, name) + getattr(added, name) for name in Hooks.__dataclass_fields__)
    )


def play(world: World) -> list[bytes]:
    for request_id in range(1, 6):
        world.admit(request_id, PROMPT * request_id)
    world.run()
    return world.plans


def test_abstaining_feature_leaves_plans_byte_identical() -> None:
    abstaining = Feature(
        "abstaining",
        can_schedule=lambda state, request: True,
        match_prefix=lambda state, request: None,
        limit_tokens=lambda state, request, wanted, budget: wanted,
        on_preempt=lambda state, request: None,
    )
    world = World()
    install(world, abstaining)
    assert play(world) == play(World())


def test_unused_features_leave_plans_byte_identical() -> None:
    worlds = [World(features=features) for features in (FEATURES, {})]
    for world in worlds:
        for request_id in range(1, 6):
            world.admit(request_id, [request_id + 50, *PROMPT])
        world.run()
    assert worlds[0].plans == worlds[1].plans


def test_features_that_are_off_have_no_hooks() -> None:
    off = Setup(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1),
        CacheConfig(memory_bytes=0, enable_prefix_caching=False),
    )
    assert build_features(off) == []
    disk = KvDiskConfig(folder="", size_bytes=1, staging_bytes=1)
    store = KvStoreConfig(url="", waiting_bytes=1, staging_bytes=1)
    on = Setup(
        replace_config(off.scheduler),
        CacheConfig(memory_bytes=0, swap_bytes=1, disk=disk, peers=KvPeersConfig(role="both"), store=store),
        prompt_embeds=True,
        pooling=True,
    )
    assert [feature.name for feature in build_features(on)] == list(FEATURES)


def replace_config(config: SchedulerConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        policy="longest",
        speculative=SpeculativeConfig(),
        long_prefill_token_threshold=1,
        step_target_ms=100,
    )


def test_can_schedule_delays_one_request_only() -> None:
    world = World(max_steps_in_flight=1)
    opened: list[int] = []
    install(
        world, Feature("gate", can_schedule=lambda state, request: request.request_id != 1 or bool(opened))
    )
    world.admit(1, PROMPT)
    world.admit(2, PROMPT)
    for _ in range(3):
        world.step()
    assert list(world.outcomes) == [2]
    opened.append(1)
    world.run()
    assert world.outcomes[1].tokens == expected(PROMPT, 1, 8)


def test_limit_tokens_splits_a_prompt() -> None:
    world = World(max_steps_in_flight=1)
    install(world, Feature("clamp", limit_tokens=lambda state, request, wanted, budget: min(wanted, 3)))
    world.admit(1, PROMPT, max_tokens=1)
    world.run()
    assert len(world.plans) == 4


def test_audit_detects_a_leak() -> None:
    world = World()
    world.admit(1, PROMPT)
    world.step()
    state = world.engine.state
    assert state is not None
    state.pool.refs[state.running[0].kv.held[0].blocks[0]] += 1
    with pytest.raises(AssertionError):
        world.step()


def test_setup_is_frozen() -> None:
    setup = Setup(SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1), CacheConfig(memory_bytes=0))
    assert replace(setup) == setup
